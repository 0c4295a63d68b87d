from trainer.engines.vllm_log import cause, hint, stage

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
