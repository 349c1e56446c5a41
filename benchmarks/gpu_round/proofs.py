"""The jobs that prove kernels right: tests, random calls, sanitizers, orders of events. They may
run side by side.
"""

from __future__ import annotations

from benchmarks.gpu_round.job import CUDA, EVERY, MMA, TRITON, Job, of_tests


def _family(
    prefix: str,
    kernels: frozenset[str],
    *rows: tuple[str, float, int, str],
    guessed: tuple[str, ...] = (),
) -> tuple[Job, ...]:
    """A job a file of tests/backends; the seconds of those in `guessed` nobody has timed."""
    return tuple(
        of_tests(
            *(f"test_{prefix}_{part}", proves, seconds, workers, kernels),
            f"backends/test_{prefix}_{part}.py",
            guessed=part in guessed,
        )
        for part, seconds, workers, proves in rows
    )


TESTS = (
    *_family(
        *("triton", TRITON),
        (
            "attention",
            200,
            8,
            "Triton kernels agree with their emulators at every shape and layout",
        ),
        ("masks", 55, 8, "Triton kernels obey masks and read no byte that they may not"),
        ("numerics", 60, 6, "Triton kernels keep to their bounds on hard numbers"),
        ("device", 85, 2, "graphs, streams, devices and threads do not change a Triton kernel"),
        ("compile", 120, 8, "every tile of the table compiles with this Triton and fits"),
        ("launching", 40, 2, "a remembered call of a Triton kernel is launched as the first one"),
        guessed=("attention", "compile"),
    ),
    *_family(
        *("cuda", CUDA),
        ("attention", 160, 8, "Hopper kernels agree with their emulators at every shape"),
        ("masks", 55, 8, "Hopper kernels obey causal offsets, windows, masks and packing"),
        ("memory", 90, 4, "strides, streams, long calls and graphs do not change a Hopper kernel"),
        ("numerics", 90, 6, "Hopper kernels keep to their bounds on hard numbers"),
        ("guard", 35, 2, "the guard recomputes what a Hopper kernel could not"),
        (
            "values",
            90,
            6,
            "Hopper kernels that read V as it lies are right, under and over the cap",
        ),
        ("raw_operands", 70, 2, "what a Hopper kernel reads as it lies starts where it may"),
        ("prepass", 70, 4, "the pre-pass gives the emulator's codes and scales, to the bit"),
        ("prepass_programs", 60, 2, "the pre-pass compiles and refuses what it cannot serve"),
        ("build", 40, 2, "this machine's compiler makes the Hopper kernels"),
        ("cache", 30, 1, "compiled kernels on disk are made once and checked"),
        ("launch", 10, 1, "a launch tells the driver what it should"),
        ("sass", 120, 4, "the main loops stay within their budget of registers and instructions"),
        guessed=("prepass_programs", "build", "cache", "sass"),
    ),
    *_family(
        *("mma", MMA),
        ("attention", 75, 8, "mma.sync kernels agree with their emulators at every shape"),
        ("memory", 30, 4, "strides, far offsets and graphs do not change an mma.sync kernel"),
        ("numerics", 55, 6, "mma.sync kernels keep to their bounds on hard numbers"),
        ("prepass", 35, 4, "codes for four bits are the emulator's, to the bit"),
        ("build", 90, 8, "the mma.sync kernels compile for every GPU that they list"),
        guessed=("build",),
    ),
    of_tests(
        *("test_calls", "known calls, memory, known answers and exact attention on a GPU", 40, 4),
        EVERY,
        *(f"backends/test_{name}.py" for name in ("known_on_gpu", "memory", "host_calls")),
        *(f"backends/test_{name}.py" for name in ("sdpa_lse", "selfcheck", "guard_flags")),
        "calibration/test_measure.py",
    ),
    *(
        of_tests(f"test_gpu_{part}", proves, seconds, 2, EVERY, f"gpu/test_gpu_{part}.py")
        for part, seconds, proves in (
            (
                "calibration",
                50,
                "calibration with real times chooses nothing slower than exact",
            ),
            ("compile", 75, "patched models compile, with the kernels themselves"),
            ("graphs", 60, "CUDA graphs of patched models replay to the bit"),
            ("kept", 50, "nothing that is kept lives in a caller's memory pool"),
            ("memory", 60, "offloaded and moved models, and the memory that a patch takes"),
        )
    ),
    of_tests(
        *("test_nccl", "context parallelism and calibration over two GPUs, through NCCL", 120, 1),
        EVERY,
        *(f"parallel/test_{name}.py" for name in ("two_gpus", "context_parallel")),
        *(f"parallel/test_{name}.py" for name in ("parallel_calls", "calibrate_many")),
        gpus=2,
        guessed=True,
    ),
)

CHECKS = (
    *(
        Job(
            f"fuzz_{toolchain}",
            f"thousands of random calls of the {toolchain} kernels stay within their bounds",
            (
                *("python", "benchmarks/h200_fuzz.py", "--out", "{out}/h200_fuzz.csv"),
                *("--only", f"{toolchain}.", "--lanes", "4", "--examples", "300"),
                *("--lane-seconds", "9", "--seconds", "95", "--workers", "{workers}"),
                *("--commit", "{commit}"),
            ),
            seconds,
            frozenset({toolchain}),
            guessed=False,
            workers=14,
            writes=(("h200_fuzz.csv", "h200_fuzz.csv"),),
            needs=("pytest", "pytest-xdist", "pytest-timeout", "hypothesis"),
        )
        for toolchain, seconds in (("triton", 105), ("cuda", 75), ("cuda_mma", 105))
    ),
    Job(
        "sanitizers",
        "memcheck, racecheck and synccheck have no word on a Hopper kernel, and see faults",
        (
            *("python", "benchmarks/h200_sanitizers.py", "--out", "{out}/h200_sanitizers.csv"),
            *("--seconds", "95", "--commit", "{commit}"),
        ),
        60,
        CUDA,
        guessed=False,
        workers=12,
        writes=(("h200_sanitizers.csv", "h200_sanitizers.csv"),),
        needs=("compute-sanitizer",),
    ),
    *(
        Job(
            name,
            proves,
            (
                *("python", "benchmarks/h200_schedule.py", "--out", "{out}/h200_schedule.csv"),
                *("--seeds", "32", "--quiet", "6", "--workers", "{workers}", "--stall", "40"),
                *("--seconds", str(seconds - 20), *options, "--commit", "{commit}"),
            ),
            seconds,
            CUDA,
            workers=24,
            writes=(("h200_schedule.csv", "h200_schedule.csv"),),
        )
        for name, seconds, options, proves in (
            (
                *("schedule_faults", 150, ("--faults-only",)),
                "a synchronisation taken out of the Hopper kernels is seen",
            ),
            (
                *("schedule_forms", 300, ("--no-faults",)),
                "the Hopper kernels give the same bits in whatever order events come",
            ),
        )
    ),
    Job(
        "ablations",
        "mma.sync kernels make of each setting what their emulator makes of it",
        ("python", "benchmarks/ablations_gpu.py", "--out", "{out}/ablations_gpu.csv"),
        180,
        MMA,
        workers=8,
        writes=(("ablations_gpu.csv", "ablations_gpu.csv"),),
    ),
)
