"""Pages that MkDocs makes from the sources: the API reference, the options of all commands, and the notebook.

MkDocs calls `on_config` and `on_files` (see `hooks` in mkdocs.yml). The pages are not files of the tree: they
cannot differ from the code.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first_model.ipynb"

PACKAGES = {
    "megalith.nn": "Features and collections",
    "megalith.models": "Models",
    "megalith.data": "Data",
    "megalith.table": "Tables",
    "megalith.shards": "Shards",
    "megalith.ps": "Parameter servers",
    "megalith.ops": "Ops",
    "megalith.checkpoint": "Checkpoints",
    "megalith.checkpoint.importers": "Importers",
    "megalith.serving": "Serving",
    "megalith.serving.discovery": "Discovery",
    "megalith.training": "Runs",
    "megalith.gather": "Gather",
    "megalith.integrations": "Integrations",
    "megalith.compat.monolith": "compat.monolith",
    "megalith.compat.torchrec": "compat.torchrec",
    "megalith.compat.dynamicemb": "compat.dynamicemb",
    "megalith.integrations.dcp": "integrations.dcp",
    "megalith.integrations.trackers": "integrations.trackers",
    "megalith.compat.templar": "compat.templar",
}
"""The packages whose `__all__` is public, with the titles of their pages."""
TOP_LEVEL = {"MegalithError": "megalith.errors", "Ragged": "megalith.ragged", "Router": "megalith.routing"}
"""Names of `megalith` that no other public package has, and their modules."""


def packages() -> dict[str, str]:
    """Return the packages that exist, with their titles."""
    found = {}
    for name, title in PACKAGES.items():
        try:
            names = getattr(importlib.import_module(name), "__all__", ())
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
            continue
        if names:
            found[name] = title
    return found


def api_path(package: str) -> str:
    return f"reference/api/{package.removeprefix('megalith.')}.md"


def api_pages() -> dict[str, str]:
    """Return the API reference: a page per package, and one of the names of `megalith` itself."""
    pages, homes = {}, dict(TOP_LEVEL)
    for package, title in packages().items():
        module = importlib.import_module(package)
        text = f"# {title}\n\n`{package}`: {inspect.getdoc(module) or ''}\n"
        for name in sorted(module.__all__, key=lambda name: (name.lower(), name)):
            if not inspect.ismodule(
                getattr(module, name, None) if package != "megalith.compat.monolith" else None
            ):
                text += f"\n::: {package}.{name}\n"
                homes.setdefault(name, package)
        pages[api_path(package)] = text
    top = "# megalith\n\nThese names are imported from `megalith`, the others from their packages.\n"
    top += "Options are keyword-only. Durations are seconds.\n\n| name | package |\n| --- | --- |\n"
    for name in importlib.import_module("megalith").__all__:
        home = homes.get(name)
        if home in PACKAGES:
            top += f"| [`{name}`][{home}.{name}] | `{home}` |\n"
        elif home is not None:
            top += f"| [`{name}`][{home}.{name}] | `megalith` |\n"
    for name, module_name in TOP_LEVEL.items():
        top += f"\n::: {module_name}.{name}\n"
    pages["reference/api/index.md"] = top
    return pages


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command and its click command, those of groups included."""
    main = importlib.import_module("megalith.cli.main")
    for name in main.COMMANDS:
        command = main.import_command(name)
        below = getattr(command, "commands", None)
        yield f"megalith {name}", command
        for inner, one in sorted((below or {}).items()):
            yield f"megalith {name} {inner}", one


def cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def default_of(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or callable(value) or (isinstance(value, list | tuple) and not value):
        return "none"
    return f"`{cell(value)}`" if value != "" else "empty"


def help_of(command: Any) -> str:
    """Return the help of a command: its text, then its examples as code."""
    lines = [line.strip() for line in inspect.cleandoc(command.help or "").replace("\b", "").splitlines()]
    examples = [line.removeprefix("Example: ") for line in lines if line.startswith("Example: ")]
    text = "\n".join(line for line in lines if not line.startswith("Example: ")).strip() + "\n"
    return text + ("\n```\n" + "\n".join(examples) + "\n```\n" if examples else "")


def options_page() -> str:
    """Return the page of all commands with their arguments and options."""
    text = "# Options of the commands\n\n[Commands](../guides/commands.md) shows how the commands are used.\n"
    for name, command in commands():
        text += f"\n## {name}\n\n"
        text += help_of(command)
        rows = []
        for parameter in command.params:
            if getattr(parameter, "hidden", False) or parameter.name == "help":
                continue
            if parameter.param_type_name == "argument":
                shown = f"`{parameter.name.upper()}`"
            else:
                shown = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
            rows.append((shown, default_of(parameter), cell(getattr(parameter, "help", "") or "")))
        if rows:
            text += "\n| option | default | meaning |\n| --- | --- | --- |\n"
            text += "".join(f"| {shown} | {default} | {meaning} |\n" for shown, default, meaning in rows)
    return text


def notebook_page() -> str:
    """Return the cells of the notebook as a page."""
    text = ""
    for one in json.loads(NOTEBOOK.read_text())["cells"]:
        source = "".join(one["source"]).strip()
        text += f"```python\n{source}\n```\n\n" if one["cell_type"] == "code" else f"{source}\n\n"
    return text.replace("](../docs/", "](")


def generated_pages() -> dict[str, str]:
    """Return the text of every generated page, by its path below docs."""
    return {**api_pages(), "reference/options.md": options_page(), "notebook.md": notebook_page()}


# ---- called by MkDocs


def on_config(config: Any) -> Any:
    """Add the pages of the API reference to the section "Reference"."""
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    pages = [{title: api_path(package)} for package, title in packages().items()]
    reference.append({"API": ["reference/api/index.md", *pages]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File

    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files
