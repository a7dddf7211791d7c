"""The tasks of the README have few commands; `scripts/new_user.py` runs them."""

from __future__ import annotations

from pathlib import Path

from new_user import MOST_COMMANDS, read_tasks

ROOT = Path(__file__).parents[2]


def test_the_tasks_of_the_readme() -> None:
    tasks = read_tasks((ROOT / "README.md").read_text(encoding="utf-8"))
    names = ["Install", "Speed up a model", "Make a package", "Serve it"]
    assert [task.name for task in tasks] == names
    assert all(1 <= len(task.commands) <= MOST_COMMANDS for task in tasks)
    install, speed, package, serve = tasks
    assert install.commands[0].startswith("pip install .")
    assert list(speed.files) == ["model.py"]
    assert list(package.files) == ["use.py"]
    assert any("report" in command for command in speed.commands)
    assert "uvicorn" in serve.commands[0]


def test_sections_without_commands_are_no_tasks() -> None:
    page = "# A\n\n## One\n\ntext\n\n## Two\n\n```bash\nls\n\npwd  # where\n```\n"
    (task,) = read_tasks(page)
    assert (task.name, list(task.commands), dict(task.files)) == ("Two", ["ls", "pwd  # where"], {})
