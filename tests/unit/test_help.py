import subprocess
import sys

import pytest

HEAVY = {"sky", "torch", "torchtune", "vllm", "fastapi", "fabric", "art", "transformers"}


@pytest.mark.parametrize("program", ["launcher", "trainer"])
def test_help_imports_nothing_heavy(program: str) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['{program}', '--help']\n"
        "try:\n"
        f"    runpy.run_module('{program}', run_name='__main__')\n"
        "except SystemExit:\n"
        "    print('MODULES', *sorted(m for m in sys.modules if '.' not in m))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    *_, line = result.stdout.splitlines()
    assert "Example" in result.stdout
    assert not HEAVY & set(line.split()), line
