"""A language model: the prompt is read on quantised attention, decoding stays exact.

python examples/llama.py --prompt "The capital of France is"
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import sagepatch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="meta-llama/Llama-2-7b-hf")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--tokens", type=int, default=20)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device).eval()
    prompt = tokenizer(options.prompt, return_tensors="pt").to(device)

    def write() -> str:
        with torch.inference_mode():
            ids = model.generate(**prompt, max_new_tokens=options.tokens, do_sample=False)
        return tokenizer.decode(ids[0], skip_special_tokens=True)

    plain = write()
    patch = sagepatch.apply(model, variant="safe")
    print(write())
    print("the same text as unpatched" if write() == plain else f"unpatched wrote: {plain}")
    print(patch.report())


if __name__ == "__main__":
    main()
