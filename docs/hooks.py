"""Pages of the documentation's site that are made of the sources, so that nothing is typed twice.

`index.md` and `modes.md` are the README and the files of `conf/amp`; `recipes/<name>.md` is a recipe's docstring, keys,
defaults and code; `reference.md` has the public names of `amp_core`; `benchmarks.md` the results. Readers of the
repository see the sources themselves, so links of the committed pages point at them; here they are turned to the pages
made of them. What has no page is linked in the repository where `REPO_URL` is set, and is plain text otherwise.

Files are parsed, not imported: torch is not needed.
"""

from __future__ import annotations

import ast
import itertools
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
ORIGIN = {
    "index.md": "README.md",
    "modes.md": "README.md",
    "recipes/index.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
}
"""Pages that are made of other files of the repository, as they are or in part."""
APART = {"modes": "modes.md", "recipes": "recipes/index.md"}
"""Sections of the README that have pages of their own."""
STEP = [
    *(
        "step.amp",
        "step.report",
        "step.window",
        "step.clip",
        "lowp.islands",
        "lowp.masters",
        "lowp.weights",
        "step.schedule",
        "step.ema",
    ),
    *("checkpoints.checkpoint", "doctor.locate", "doctor.diagnosis", "config.schema"),
]
"""The modules with public names, as a step and then a run meets them."""
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


# --- what mkdocs calls ------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Puts the recipes into the navigation, and leaves pages out that are not written yet."""
    made = pages()

    def kept(entries: list[Any]) -> list[Any]:
        found = []
        for entry in entries:
            (title, target), *_ = entry.items()
            if target == "recipes/":
                target = ["recipes/index.md", *({name: f"recipes/{name}.md"} for name in recipes())]
            elif isinstance(target, list):
                target = kept(target)
            elif target not in made and not (ROOT / "docs" / target).is_file():
                continue
            found.append({title: target})
        return found

    config.nav = kept(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made."""
    from mkdocs.structure.files import File

    for path, content in pages().items():
        files.append(File.generated(config, path, content=content))
    for picture in sorted((ROOT / "benchmarks").rglob("*.png")):
        files.append(File.generated(config, picture.relative_to(ROOT).as_posix(), abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links to sources into links to pages."""
    path = page.file.src_path
    if path in pages() and path not in ORIGIN:
        return markdown
    return relinked(markdown, ORIGIN.get(path, f"docs/{path}"), path, config.repo_url)


# --- links ------------------------------------------------------------------------------------------------------------


def site_path(target: str) -> str | None:
    """The page that shows a file of the repository, if there is one."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if re.fullmatch(r"recipes/[a-z]\w*\.py", target):
        return target.removesuffix(".py") + ".md"
    whole = {"README.md": "index.md", "benchmarks/README.md": "benchmarks.md"}
    return (whole | {"recipes": "recipes/index.md", "conf/amp": "modes.md"}).get(target)


def relinked(markdown: str, origin: str, page: str, repo_url: str | None) -> str:
    """The text of `origin`, a file of the repository, with links that are right on `page` of the site."""

    def turned(match: re.Match[str]) -> str:
        text, (target, _, anchor) = match[1], match[2].partition("#")
        if "://" in target:
            return match[0]
        if not target:
            apart = APART.get(anchor) if origin == "README.md" else None
            return f"[{text}]({posixpath.relpath(apart, posixpath.dirname(page))})" if apart else match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        found = site_path(path)
        if found is None:
            return f"[{text}]({repo_url.rstrip('/')}/blob/main/{path})" if repo_url else text
        return f"[{text}]({posixpath.relpath(found, posixpath.dirname(page))}{'#' + anchor if anchor else ''})"

    def pictured(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match[2]))
        return f"![{match[1]}]({posixpath.relpath(path.removeprefix('docs/'), posixpath.dirname(page))})"

    def text(piece: str) -> str:
        return LINK.sub(turned, re.sub(r"!\[([^\]]*)\]\(([^)\s]+)\)", pictured, piece))

    return "".join(piece if piece.startswith("```") else text(piece) for piece in CODE.split(markdown))


# --- pages ------------------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """Markdown by path in the site."""
    readme = sections((ROOT / "README.md").read_text())
    made = {
        "index.md": "".join(text for title, text in readme.items() if title.lower() not in APART),
        "modes.md": raised(readme["Modes"]) + modes(),
        "recipes/index.md": raised(readme["Recipes"]),
        "benchmarks.md": (ROOT / "benchmarks" / "README.md").read_text(),
        "reference.md": reference(),
    }
    return made | {f"recipes/{name}.md": recipe(name) for name in recipes()}


def sections(markdown: str) -> dict[str, str]:
    """Text by heading of the second level; what comes before the first has the key ""."""
    first, *rest = re.split(r"^(?=## )", markdown, flags=re.MULTILINE)
    return {"": first} | {text.partition("\n")[0].removeprefix("## "): text for text in rest}


def raised(markdown: str) -> str:
    """The same with headings of one level less."""
    return re.sub(r"^#(?=#+ )", "", markdown, flags=re.MULTILINE)


def recipes() -> list[str]:
    """The names in the table of recipes."""
    tree = ast.parse((ROOT / "recipes" / "__init__.py").read_text())
    return list(constant(tree, "RECIPES"))


def constant(tree: ast.Module, name: str) -> Any:
    """The value of a literal in a module; None: it has no such name."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return ast.literal_eval(node.value)
    return None


def values(path: Path) -> tuple[str, dict[str, tuple[str, str]]]:
    """The comment on top of a YAML file, and (value, comment) by key, as written there."""
    text = path.read_text()
    heads = [line[2:] for line in text.splitlines() if line.startswith("# ") and not line.startswith("# @")]
    found = re.findall(r"^ *(\w+): +([^#\n]*?) *(?:# *(.*))?$", text, re.MULTILINE)
    return " ".join(heads), {key: (value, comment) for key, value, comment in found}


def modes() -> str:
    """What the files of conf/amp say, mode by mode, without what a mode has no use for."""
    lines = [
        "\n## Every key of every mode\n\nThe files of `conf/amp`; every key is a setting, `amp.init_scale=1024`.\n\n"
    ]
    options = {path.stem: values(path)[1] for path in sorted((ROOT / "conf" / "amp").glob("*.yaml"))}
    for table in options.values():
        if found := re.match(r"\[(\w+), _self_\]", table.get("defaults", ("", ""))[0]):  # another mode, but for ...
            table |= options[found[1]] | table
    keys = [key for key in options["fp16"] if key != "name"]
    lines.append(
        "| key | " + " | ".join(f"`{mode}`" for mode in options) + " |\n" + "| --- " * (len(options) + 1) + "|\n"
    )
    for key in keys:
        cells = [table[key][0].replace("null", "").replace("[]", "none") for table in options.values()]
        lines.append(f"| `{key}` | " + " | ".join(cells) + " |\n")
    return "".join(lines)


def knobs(tree: ast.Module) -> dict[str, str]:
    """Documentation of each key of a recipe, but for its name: those of every recipe first."""
    schema = ast.parse((ROOT / "amp_core" / "config" / "schema.py").read_text())
    classes = {node.name: node.body for part in (schema, tree) for node in part.body if isinstance(node, ast.ClassDef)}
    fields = [*classes["RecipeConfig"], *classes["Knobs"]]
    found: dict[str, str] = {}
    for field, after in itertools.pairwise([*fields, ast.Pass()]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id != "name":
            said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            found[field.target.id] = " ".join(str(said).split())
    return found


def recipe(name: str) -> str:
    """A recipe's page: lesson, commands and expected result as its docstring has them; then keys, defaults, code."""
    source = (ROOT / "recipes" / f"{name}.py").read_text()
    config = (ROOT / "conf" / "recipe" / f"{name}.yaml").read_text()
    tree = ast.parse(source)
    title, _, lesson = (ast.get_docstring(tree) or "").partition("\n")
    defaults = values(ROOT / "conf" / "recipe" / f"{name}.yaml")[1]
    rows = []
    for key, said in knobs(tree).items():
        value, comment = defaults.get(key, ("", ""))
        rows.append(f"| `recipe.{key}` | `{value}` | {said or comment} |")
    kind = constant(tree, "DATA")
    checks = ast.parse((ROOT / "amp_core" / "config" / "kinds.py").read_text())
    data = ", ".join(f"`{option}`" for option, holds in constant(checks, "KINDS").items() if holds == kind)
    usual = constant(ast.parse((ROOT / "amp_core" / "run" / "preflight.py").read_text()), "LAYOUTS")
    layouts = ", ".join(f"`{layout}`" for layout in constant(tree, "LAYOUTS") or usual)
    return f"""# {title.rstrip(".")}

{lesson.strip()}

## Keys of its own

| key | default | |
| --- | --- | --- |
{chr(10).join(rows)}

It takes {kind} as data (`data=`: {data}) and runs in these layouts: {layouts}. `tests/recipes/test_recipes.py` trains
it in `fp32`, `bf16` and `fp16`; [Modes](../modes.md) has the others.

## Its defaults

`conf/recipe/{name}.yaml`, on top of `conf/config.yaml`; `python train.py recipe={name} --cfg job` prints the whole.

```yaml
{config.strip()}
```

## The file

`recipes/{name}.py`:

```python
{source.strip()}
```
"""


def reference() -> str:
    """The public names of the core, in the order of a step."""
    tree = ast.parse((ROOT / "amp_core" / "__init__.py").read_text())
    home = constant(tree, "_HOME")
    said = (ast.get_docstring(tree) or "").strip()
    lines = [f"# Reference\n\n{said}\n\n[Start](index.md#the-core-without-the-rest) shows them in a loop.\n"]
    for name in sorted(
        home,
        key=lambda name: (STEP.index(home[name]) if home[name] in STEP else len(STEP), not name[0].isupper(), name),
    ):
        lines.append(f"\n::: amp_core.{home[name]}.{name}\n")
    return "".join(lines)
