"""For the Python of a vLLM environment: one engine, offline, and every logit that it makes.

An order comes as JSON on standard input: `engine`, the options of vllm.LLM; `prompts`, token ids; `tokens`, how many
to generate for each; `out`, an .npz file that then holds `tokens` [prompts, tokens] and `logits` [prompts, tokens,
vocabulary], float32.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from vllm import LLM, SamplingParams


def main() -> None:
    """Carry one order out."""
    order = json.load(sys.stdin)
    engine = LLM(**order["engine"], logprobs_mode="raw_logits", max_logprobs=-1, skip_tokenizer_init=True)
    sampling = SamplingParams(temperature=0, max_tokens=order["tokens"], ignore_eos=True, logprobs=-1, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
    made = [request.outputs[0] for request in engine.generate(prompts, sampling, use_tqdm=False)]
    logits = [[[step[id].logprob for id in range(len(step))] for step in one.logprobs] for one in made]
    np.savez(order["out"], tokens=[one.token_ids for one in made], logits=np.array(logits, np.float32))


if __name__ == "__main__":  # vLLM's own processes import this file again.
    main()
