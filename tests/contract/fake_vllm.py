"""A stand-in for `vllm serve` on machines without a GPU, where vLLM cannot sleep.

It has the routes that sleep mode needs, fails all other requests while it sleeps, as the real one
would on freed memory, and logs every request with its process id. As a part of another machine's
vLLM it does nothing until it is ended.
"""

import argparse
import json
import os
import signal
import socketserver
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

loras: set[str] = set()
asleep = False


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        served = [{"id": name, "max_model_len": 2048} for name in ("base", *sorted(loras))]
        self.reply(200, {"data": served} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with Path(os.environ["FAKE_VLLM_REQUESTS"]).open("a") as file:
            print(os.getpid(), self.path, file=file)
        self.reply(*self.act(body))

    def act(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        global asleep
        if self.path in ("/sleep?level=1", "/wake_up"):
            if not can_sleep or os.environ.get("FAKE_VLLM_FAILS") == self.path:
                return 404, {"error": {"message": "Not Found"}}
            asleep = self.path != "/wake_up"
        elif asleep:
            return 500, {"error": {"message": "CUDA error: an illegal memory access"}}
        elif self.path == "/v1/load_lora_adapter":
            loras.add(body["lora_name"])
        elif self.path == "/v1/unload_lora_adapter":
            loras.remove(body["lora_name"])
        elif body["model"] not in {"base", *loras}:
            return 404, {"error": {"message": "no such model"}}
        else:
            tokens = [97 + token % 26 for token in body["prompt"][: body["max_tokens"]]]
            logprobs = {"token_logprobs": [-0.5] * len(tokens)}
            choice = {"index": 0, "token_ids": tokens, "logprobs": logprobs}
            return 200, {"choices": [{**choice, "finish_reason": "length"}]}
        return 200, {}

    def reply(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: Any) -> None: ...


if os.environ.get("FAKE_VLLM_FAILS") == "start" and "--enable-sleep-mode" in sys.argv:
    sys.exit("ValueError: Sleep mode is not supported on current platform.")
if os.environ.get("FAKE_VLLM_FAILS") == "kernels" and "gpu_kernels.Worker" in sys.argv:
    file = "/kit/trainer/engines/in_vllm/lora_kernel.py"
    sys.exit(f'  File "{file}", line 9, in add_lora\ntriton.CompilationError: at 9:0')
parser = argparse.ArgumentParser()
parser.add_argument("--uds")
parser.add_argument("--headless", action="store_true")
parser.add_argument("--enable-sleep-mode", action="store_true")
arguments, _ = parser.parse_known_args()
if arguments.headless:
    signal.pause()
can_sleep = arguments.enable_sleep_mode and os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
with socketserver.ThreadingUnixStreamServer(arguments.uds, Handler) as server:
    server.serve_forever()
