"""llama.cpp's own server over `MODEL [LORA]`, until stdin closes; prints its address."""

import json
import sys

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
for path in sys.argv[2:]:
    lora = xllamacpp.CommonAdapterLoraInfo()
    lora.path, lora.scale = path, 1.0
    params.lora_adapters = [lora]
params.n_ctx = 1024
params.n_parallel = 1
# Its threads wait for each other by spinning: on a busy machine two take minutes for a sentence.
params.cpuparams.n_threads = 1
params.cpuparams_batch.n_threads = 1
params.warmup = False
params.port = 0
server = xllamacpp.Server(params)
sys.stdout.write(json.dumps(server.listening_address) + "\n")
sys.stdout.flush()
sys.stdin.read()
