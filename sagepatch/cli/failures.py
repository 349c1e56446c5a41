"""What other libraries raise while a model is found and loaded, as one sentence of ours."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sagepatch.cli.sources import Source
from sagepatch.errors import MachineError, ModelError, SagepatchError


def gated_sentence(location: str) -> str:
    """How to get at a gated model."""
    return (
        f"{location} is gated: accept its licence on its page of the Hugging Face hub, "
        "log in with `hf auth login` (or set HF_TOKEN), and run this again"
    )


@contextmanager
def loading(source: Source) -> Iterator[None]:
    """Turn what loading `source` raises into a `ModelError` or `MachineError`."""
    from safetensors import SafetensorError

    try:
        yield
    except (SagepatchError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        raise MachineError(
            f"loading {source.asked} needs a package that is not here: {first_sentence(error)}"
        ) from error
    except (OSError, ValueError, AttributeError, SafetensorError, RuntimeError) as error:
        raise explain(source, error) from error


def explain(source: Source, error: BaseException) -> SagepatchError:
    """The sentence for an error of the hub or of a loader; the cause may be wrapped."""
    from huggingface_hub import errors as hub

    chain = list(_chain(error))

    def met(*kinds: type[BaseException]) -> bool:
        return any(isinstance(one, kinds) for one in chain)

    name = source.location
    full_disk = [one for one in chain if getattr(one, "errno", None) == errno.ENOSPC]
    if full_disk:
        return MachineError(f"the disk is full while loading {name}: free space, or set HF_HOME")
    if met(hub.GatedRepoError):
        return ModelError(gated_sentence(name))
    if met(hub.RepositoryNotFoundError, hub.HFValidationError):
        return ModelError(
            f"the hub has no model {name}: check the name; a private one needs `hf auth login`"
        )
    if met(hub.OfflineModeIsEnabled):
        return ModelError(
            f"{name} is not in the local cache and offline mode is on: "
            "unset HF_HUB_OFFLINE, or give a local folder"
        )
    if not source.is_local and (met(hub.LocalEntryNotFoundError, ConnectionError) or _wire(chain)):
        return ModelError(
            f"the hub cannot be reached and {name} is not in the local cache: "
            "check the network, or give a local folder"
        )
    if "safetensors" in str(error):
        return ModelError(
            f"{name} has no safetensors weights, and pickled ones can run code: "
            "convert it, or take another revision"
        )
    return ModelError(f"{name} cannot be loaded: {first_sentence(error)}")


def first_sentence(error: BaseException) -> str:
    """The first line of an error's text, its type where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _wire(chain: list[BaseException]) -> bool:
    """Whether an HTTP client gave up; its classes differ between versions of the hub's client."""
    return any(
        type(one).__module__.partition(".")[0].startswith(("httpx", "httpcore", "requests"))
        for one in chain
    )
