#!/usr/bin/env bash
# Runs NVIDIA's guide on this machine: install, serve, `nat finetune`, and check the result.
#
#   ./run.sh [epochs]        2 by default; takes about two minutes on a laptop, mostly NAT's startup and polling
#
# HOST, PORT, OPENAI_PORT, STATE, ENGINE, TRAINER and NAT can be set in the environment. NAT always checks port 8000
# for the engine, so change OPENAI_PORT only if another server answers there.
set -euo pipefail
cd "$(dirname "$0")"
epochs=${1:-2}
host=${HOST:-127.0.0.1} port=${PORT:-7623} openai=${OPENAI_PORT:-8000} state=${STATE:-$PWD/.tmp/art}
trainer=${TRAINER:-../../.venv/bin/trainer} nat=${NAT:-.venv/bin/nat}

[ -x "$trainer" ] || ../../scripts/install
if [ ! -x "$nat" ]; then # NAT conflicts with SkyPilot, so it gets its own environment
  export PATH="$PATH:$HOME/.local/bin:$PWD/../../.uv/bin"
  uv venv --python 3.11 .venv
  uv pip install --python .venv/bin/python --constraints ../../requirements/clients/nat-0.5.18.txt \
    --editable '../..[nat]' --editable .
fi

mkdir -p .tmp
# No --base-model: NAT registers the model, which loads it with the engine_args of the YAML.
"$trainer" serve --host "$host" --port "$port" --openai-port "$openai" \
  --engine "${ENGINE:-auto}" --state-dir "$state" >"$state.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
for _ in $(seq 120); do
  kill -0 $server 2>/dev/null || { cat "$state.log" >&2; exit 1; }
  curl -sf "http://$host:$openai/health" >/dev/null && break
  sleep 0.5
done

# At more verbose levels than `warning`, NAT 1.9 fails on a config that contains itself.
"$nat" --log-level warning finetune --config_file config.yml \
  -o finetuning.num_epochs "$epochs" \
  -o llms.training_llm.base_url "http://$host:$openai/v1" \
  -o trainer_adapters.art_adapter.backend.ip "$host" \
  -o trainer_adapters.art_adapter.backend.port "$port"

# NAT always exits with 0, so ask the server.
python3 check.py "http://$host:$port" "http://$host:$openai" "$epochs"
