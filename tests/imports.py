"""Which library and kernel modules a stage script imports, directly or through others, read from the source.

Imports inside functions count. Two exceptions follow what happens at run time: ``otf_llm/__init__`` registers the
quantizer only when transformers is imported, so ``registration`` counts where some module of the stage imports
transformers; and ``registration`` itself loads ``modules`` only for converted folders, whose readers import it anyway.

Run it to print the declaration for every script: ``python tests/imports.py``.
"""

import ast
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
ROOTS = {"otf_llm": REPOSITORY / "scripts", "otf_kernels": REPOSITORY / "kernels"}
EVERY_STAGE = {"otf_llm/__init__", "otf_llm/memory", "otf_llm/stage"}


def imported_names(path: Path) -> set[str]:
    """Dotted names that a file imports; ``from a import b`` gives both ``a`` and ``a.b``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def module_file(name: str) -> str | None:
    """``otf_llm/packing`` for the dotted name of a module of ours, None for any other name."""
    root = ROOTS.get(name.partition(".")[0])
    if root is None:
        return None
    path = root / name.replace(".", "/")
    if path.with_suffix(".py").is_file():
        return name.replace(".", "/")
    return f"{name.replace('.', '/')}/__init__" if (path / "__init__.py").is_file() else None


def source_of(module: str) -> Path:
    return ROOTS[module.partition("/")[0]] / f"{module}.py"


def closure(script: Path) -> set[str]:
    """Modules of ours that a script depends on."""
    found: set[str] = set()
    pending = [script]
    with_transformers = False
    while pending:
        path = pending.pop()
        names = imported_names(path)
        if path.name != "registration.py" and path != source_of("otf_llm/__init__"):
            with_transformers |= any(name.partition(".")[0] == "transformers" for name in names)
        if path.name == "registration.py":
            names -= {"otf_llm.modules"}
            names = {name for name in names if not name.startswith("otf_llm.modules.")}
        if path == source_of("otf_llm/__init__"):
            names = {name for name in names if not name.startswith("otf_llm.registration")}
        modules = {module_file(name) for name in names} - {None}
        if with_transformers:
            modules.add("otf_llm/registration")
        pending += [source_of(module) for module in modules - found]
        found |= modules
    return found


if __name__ == "__main__":
    for script in sorted((REPOSITORY / "scripts").glob("*.py")):
        names = sorted(closure(script) - EVERY_STAGE)
        print(script.name, ", ".join(f'"{name.removeprefix("otf_llm/")}"' for name in names), sep="\n    ")
