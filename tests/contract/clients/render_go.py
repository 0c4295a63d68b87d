"""Render TEMPLATE with VALUES, a file of JSON, by Go's engine; prints the text as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

environment = Path(sys.prefix)
program = environment / "render"
if not program.exists():
    # Offline, and with files of its own: a test has an empty home.
    settings = {"GOTOOLCHAIN": "local", "GOCACHE": str(environment / "go"), "CGO_ENABLED": "0"}
    go = [str(environment / "bin" / "go"), "build", "-o", str(program)]
    source = str(Path(__file__).with_name("render.go"))
    subprocess.run([*go, source], env={**os.environ, **settings}, check=True)
text = subprocess.check_output([program, *sys.argv[1:]], text=True)
sys.stdout.write(json.dumps(text) + "\n")
