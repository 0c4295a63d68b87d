#!/usr/bin/env bash
# Launch a cluster, wait until its server is healthy, and say what comes next.
#
#   ./launch-cluster.sh                              sky/art.yaml as cluster `art`
#   ./launch-cluster.sh sky/art-cpu.yaml -c test     another task, another name
#   ./launch-cluster.sh --infra aws --gpus L4:1      any argument of `sky launch`
#   ./launch-cluster.sh --max-cost 20                another lease than 8 hours and 30 idle minutes
#   ./launch-cluster.sh --local                      on this machine: trains the Temporal Clue example
#   ./launch-cluster.sh --local --seed 1             the same with other puzzles first; also --epochs
#   ./launch-cluster.sh --local sky/art-cpu.yaml     on this machine: a task, and nothing else
#
# Settings and secrets come from .env (see .env.example). Safe to repeat.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
caller=$PWD
cd "$(dirname "$0")"
# A task or an env file that the caller named is the caller's; one that is not there is one of ours.
[ "$caller" -ef . ] || for argument; do
  case "$argument" in *.yaml | *.yml | *.env) [ ! -f "$caller/$argument" ] || argument="$caller/$argument" ;; esac
  shift
  set -- "$@" "$argument"
done
trains_here() { [ "${1:-}" = --local ] && case "${2:---seed}" in --seed | --epochs) ;; *) false ;; esac; }
has_vllm() { .venv/bin/python -c 'import importlib.util as u; exit(not u.find_spec("vllm"))' 2>/dev/null; }
# On a GPU machine the environment may be that of a cluster, with vLLM, which SkyPilot cannot share.
trains_here "$@" && has_vllm || scripts/install
trains_here "$@" && exec .venv/bin/python -m examples.temporal_clue.local "${@:2}"
exec .venv/bin/launcher up "$@"
