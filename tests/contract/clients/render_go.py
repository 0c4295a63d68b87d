"""Render TEMPLATE with VALUES, a file of JSON, by Go's engine; prints the text as JSON."""

import json
import sys
from pathlib import Path

import go_template

values = json.loads(Path(sys.argv[2]).read_text())
text = go_template.render(Path(sys.argv[1]), values).decode()
sys.stdout.write(json.dumps(text) + "\n")
