"""A bug report in Markdown: places for what happened, and what `inductor-ext doctor` found (pure).

The report goes to other people: the path of the home folder is replaced by `~`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_TEMPLATE = """\
# Bug report

Complete the first three sections, and paste the whole text into a new issue.

## What happens

What did you expect, and what happens instead? Paste the whole traceback.

## A program that shows it

As short as possible, and without private data. It should run as it is.

```python
```

## Without the extension

Does it also happen with `INDUCTOR_EXT_ENABLED=0`, or with `backend="inductor"`? If so, please
report it to PyTorch.

## Environment

{code}text
{text}
{code}

<details>
<summary>The same as JSON</summary>

{code}json
{data}
{code}

</details>
"""

_FENCE = "````"


def render(text: str, data: Mapping[str, Any], home: str) -> str:
    """Return the report.

    Args:
        text: what `inductor-ext doctor` prints.
        data: the same as a JSON object.
        home: path of the user's home folder.
    """
    report = _TEMPLATE.format(code=_FENCE, text=text.strip(), data=json.dumps(data, indent=2))
    home = home.rstrip("/")
    return report.replace(f"{home}/", "~/") if home else report
