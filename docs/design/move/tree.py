"""What `tree.json` says, by dotted names."""
import json, os, tempfile

_TREE = json.load(open(os.path.join(os.path.dirname(__file__), "..", "tree.json"), encoding="utf-8"))
#: Where package.py leaves what users.py needs.
TABLE = os.path.join(tempfile.gettempdir(), "shardwright_move_table")
#: Packages that there are today: their names stand without "__init__".
_TODAY = {"launch", "rules", "solver", "runtime", "report", "checkpoint", "integrations", ""}


def _dotted(path):
    return path.removesuffix(".py").replace("/", ".")


def _new(path):
    name = _dotted(path)
    package = "" if name == "__init__" else name.removesuffix(".__init__")
    return package if name.endswith("__init__") and package in _TODAY else name


MAP = {_new(new): [_dotted(old) for old in olds] for new, olds in _TREE["files"].items()}
RENAMES = {(_dotted(old), before): after for old, names in _TREE["renames"].items() for before, after in names.items()}


def modules(root):
    """Dotted module -> its file."""
    out = {}
    for folder, _, files in os.walk(os.path.join(root, "shardwright")):
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                out[_dotted(os.path.relpath(path, root)).removesuffix(".__init__")] = path
    return out
