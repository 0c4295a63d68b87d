#!/usr/bin/env bash
# Launch a cluster, wait until its server is healthy, and print the next commands.
#
#   ./launch-cluster.sh                              sky/art.yaml as cluster `art`
#   ./launch-cluster.sh sky/art-cpu.yaml -c test     another task, another name
#   ./launch-cluster.sh --infra aws --gpus L4:1      any argument of `sky launch`
#   ./launch-cluster.sh --max-cost 20                also stop at 20 dollars (default: 8 hours, 30 minutes idle)
#   ./launch-cluster.sh --local                      on this machine: train the Temporal Clue example
#   ./launch-cluster.sh --local --seed 1             the same with the puzzles in another order; also --epochs
#   ./launch-cluster.sh --local sky/art-cpu.yaml     on this machine: only run the task
#
# Settings and secrets come from .env (see .env.example). Safe to repeat.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
caller=$PWD
cd "$(dirname "$0")"
# A task or env file is looked up in the caller's directory first, then in this one.
[ "$caller" -ef . ] || for argument; do
  case "$argument" in *.yaml | *.yml | *.env) [ ! -f "$caller/$argument" ] || argument="$caller/$argument" ;; esac
  shift
  set -- "$@" "$argument"
done
trains_here() { [ "${1:-}" = --local ] && case "${2:---seed}" in --seed | --epochs) ;; *) false ;; esac; }
has_vllm() { .venv/bin/python -c 'import importlib.util as u; exit(not u.find_spec("vllm"))' 2>/dev/null; }
# If .venv has vLLM (a GPU machine), leave it alone: SkyPilot cannot share an environment with vLLM.
trains_here "$@" && has_vllm || scripts/install
trains_here "$@" && exec .venv/bin/python -m examples.temporal_clue.local "${@:2}"
exec .venv/bin/launcher up "$@"
