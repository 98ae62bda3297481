"""A 70B model is captured in seconds and without its memory."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, time, torch
import transformers
from galvatron_lite.capture.trace import trace

def held():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

start, before = time.process_time(), held()
with torch.device("meta"):
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        intermediate_size=28672)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.empty(1, 4096, dtype=torch.long)
graph = trace(model, {"input_ids": ids, "labels": ids}, precision="bf16")
print(time.process_time() - start, held() - before, graph.parameters, len(graph.layers), graph.kinds["block"].flops)
"""


@pytest.mark.study
def test_llama_70b_on_meta() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=280)
    seconds, grown, parameters, layers, flops = map(float, done.stdout.split())
    assert seconds < 30
    assert grown < 2e9
    assert parameters == 68_976_648_192
    assert layers == 82
    matmul = 2 * 4096 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    assert flops == matmul + 4 * 4096**2 * 8192
