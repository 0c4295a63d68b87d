import pytest

from trainer.engines.vllm_log import cause, hint, names_our_kernels, stage

PROGRESS = [
    "INFO 11-15 03:04:40 [model.py:1] Resolved architecture: LlamaForCausalLM",
    "(EngineCore pid=9) INFO 11-15 03:04:41 [runner.py:1] Starting to load model /m...",
]


def test_the_stage_is_the_last_one_in_the_log() -> None:
    assert stage([]) == "importing its libraries"
    assert stage(PROGRESS[:1]) == "reading the model's configuration"
    assert stage([*PROGRESS, "INFO something else"]) == "loading the weights"


def test_the_cause_is_the_first_error_not_its_consequences() -> None:
    log = """\
(EngineCore pid=7) ERROR 11-15 03:10:50 [core.py:906] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-15 03:10:50 [core.py:906]   File "/x/worker.py", line 3, in load
(EngineCore pid=7) ERROR 11-15 03:10:50 [core.py:906] ValueError: Free memory on device (3.1/80 GiB) is less than desired
(APIServer pid=2) Traceback (most recent call last):
(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
guard: the program ended with code 1
"""  # noqa: E501
    found = cause(log.splitlines())
    assert found == "ValueError: Free memory on device (3.1/80 GiB) is less than desired"
    assert "gpu_memory_utilization" in (hint(found) or "")


def test_an_assertion_error_includes_the_assertion() -> None:
    prefix = "(EngineCore pid=805) ERROR 11-16 02:44:41 [core.py:1330] "
    lines = [
        f"{prefix}  File lora_expand_op.py, line 183, in _lora_expand",
        f"{prefix}    assert weight.dtype in [torch.float16, torch.bfloat16]",
        f"{prefix}           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        f"{prefix}AssertionError",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    found = cause(lines)
    assert found == "AssertionError: assert weight.dtype in [torch.float16, torch.bfloat16]"
    assert "Remove `dtype`" in (hint(found) or "")


def test_a_wrong_flag_is_reported_with_the_parsers_message() -> None:
    log = ["usage: vllm serve [model_tag]", "vllm serve: error: unrecognized arguments: --foo 1"]
    assert cause(log) == "unrecognized arguments: --foo 1"
    assert "engine_args" in (hint(cause(log)) or "")


def test_an_engine_that_was_killed_logs_no_error_itself() -> None:
    log = [
        "(APIServer pid=2) WARNING 11-15 03:10:50 [c.py:1] engine core exited unexpectedly",
        "(APIServer pid=2) ERROR 11-15 03:10:50 [a.py:2] vllm.EngineDeadError: See stack trace",
    ]
    assert cause(log) == "its engine process was killed, perhaps for lack of memory"


def test_without_any_error_the_cause_is_the_last_line() -> None:
    assert cause(
        ["INFO:     Started", "process group: the program ended with code -9", ""]
    ).endswith("-9")
    assert cause([]) == "its log is empty"
    assert hint("who knows") is None


OURS = 'File "/kit/trainer/engines/in_vllm/decode_attention.py", line 116, in divided'
THEIRS = 'File "/x/vllm/v1/worker/gpu/model_runner.py", line 9, in sample'


@pytest.mark.parametrize(
    ("place", "error", "ours"),
    [
        (OURS, "RuntimeError: Triton Error [CUDA]: invalid argument", True),
        (THEIRS, "RuntimeError: Triton Error [CUDA]: invalid argument", False),
        # Kernels run later than they are called, so this error names any place.
        (
            THEIRS,
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
            True,
        ),
        # vLLM's own attention is called by ours.
        (OURS, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", False),
    ],
)
def test_our_kernels_are_blamed_for_what_they_may_have_done(
    place: str, error: str, ours: bool
) -> None:
    prefix = "(EngineCore pid=805) ERROR 11-16 02:44:41 [core.py:1330] "
    lines = ["Traceback (most recent call last):", f"  {place}", error]
    assert names_our_kernels([prefix + line for line in lines]) is ours
