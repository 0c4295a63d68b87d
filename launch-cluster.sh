#!/usr/bin/env bash
# Launch a cluster, wait until its server is healthy, and say what comes next.
#
#   ./launch-cluster.sh                              sky/art.yaml as cluster `art`
#   ./launch-cluster.sh sky/art-cpu.yaml -c test     another task, another name
#   ./launch-cluster.sh --infra aws --gpus L4:1      any argument of `sky launch`
#   ./launch-cluster.sh --local                      on this machine: trains the Temporal Clue example
#   ./launch-cluster.sh --local sky/art-cpu.yaml     on this machine: a task, and nothing else
#
# Settings and secrets come from .env (see .env.example). Safe to repeat.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")"
# On a GPU machine the environment may be that of a cluster, with vLLM, which SkyPilot cannot share.
[ "$*" = --local ] && .venv/bin/python -c 'import importlib.util as u; exit(not u.find_spec("vllm"))' 2>/dev/null ||
  scripts/install
[ "$*" != --local ] || exec .venv/bin/python -m examples.temporal_clue.local
exec .venv/bin/launcher up "$@"
