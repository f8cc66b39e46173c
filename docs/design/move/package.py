"""Write the package in the target tree beside the old one: ``python package.py ROOT [--dry]``; see README.md."""
import ast, builtins, collections, os, re, shutil, sys

import libcst as cst
from libcst.metadata import MetadataWrapper, ScopeProvider, PositionProvider, GlobalScope
import tree as mapping
ROOT, DRY = sys.argv[1], "--dry" in sys.argv
P = "shardwright"
mods = mapping.modules(ROOT)
def s_(m): return m[len(P):].lstrip(".")          # shardwright.plan.x -> plan.x ; shardwright -> ""
old = {}                                            # short name -> path
for m, p in mods.items():
    old[s_(m)] = p
ispkg = {o for o, p in old.items() if p.endswith("__init__.py")}
old2new = {}
for new, olds in mapping.MAP.items():
    for o in olds:
        o = o[:-9] if o.endswith(".__init__") else ("" if o == "__init__" else o)
        old2new[o] = new
DROP = {"plan"}                                     # packages whose __init__ only re-exports
newpkg = set()
for new in mapping.MAP:
    n = new[:-9] if new.endswith(".__init__") else new
    parts = n.split(".")
    for k in range(1, len(parts)): newpkg.add(".".join(parts[:k]))
    if new.endswith(".__init__"): newpkg.add(n)
newpkg |= {"", "launch", "rules", "solver", "runtime", "report", "checkpoint", "integrations"}
def norm(new): return new[:-9] if new.endswith(".__init__") else new
def path_of(new):
    n = norm(new)
    rel = n.replace(".", "/")
    return os.path.join(P, rel, "__init__.py") if n in newpkg or n == "" else os.path.join(P, rel + ".py")
src = {o: open(p).read() for o, p in old.items()}
tree = {o: ast.parse(t) for o, t in src.items()}
def absolute(o, node):
    """old module that an ImportFrom names (short), or None when external"""
    if node.level:
        parts = o.split(".") if o else []
        n = node.level - (1 if o in ispkg else 0)
        base = parts[: len(parts) - n] if n else parts
        return ".".join(base + (node.module.split(".") if node.module else []))
    if node.module == P: return ""
    if node.module and node.module.startswith(P + "."): return node.module[len(P) + 1:]
    return None
# --- bindings
defs, binds = {}, {}     # o -> set of names ; o -> {local: origin}
def toplevel(o):
    for node in tree[o].body:
        yield node
def is_type_block(node): return isinstance(node, ast.If) and isinstance(node.test, (ast.Name, ast.Attribute)) and "TYPE_CHECKING" in ast.dump(node.test)
def targets(node):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)): yield node.name
    elif isinstance(node, ast.Assign):
        for t in node.targets:
            for x in ast.walk(t):
                if isinstance(x, ast.Name) and x.id != '_': yield x.id
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and isinstance(node.target, ast.Name): yield node.target.id
    elif isinstance(node, (ast.For, ast.While, ast.If, ast.Try, ast.With)) and not is_type_block(node):
        if isinstance(node, ast.For):
            for x in ast.walk(node.target):
                if isinstance(x, ast.Name) and x.id != "_": yield x.id
        for ch in ast.iter_child_nodes(node):
            for sub in ([ch] if isinstance(ch, ast.stmt) else []):
                yield from targets(sub)
            if isinstance(ch, ast.ExceptHandler):
                for sub in ch.body: yield from targets(sub)
raw = {o: {} for o in old}   # local -> (target short module, name|None)   internal
ext = {o: {} for o in old}   # local -> external text
typed = {o: set() for o in old}
for o in old:
    defs[o] = set()
    for node in toplevel(o):
        defs[o] |= set(targets(node))
        stack = [(node, False)] if not is_type_block(node) else [(x, True) for x in node.body]
        for n, t in stack:
            if isinstance(n, ast.ImportFrom):
                a = absolute(o, n)
                for al in n.names:
                    local = al.asname or al.name
                    if a is None: ext[o][local] = ("from", n.module, al.name, al.asname, t)
                    elif (a + "." + al.name).lstrip(".") in old and not (a == "" and al.name in ("plan", "verify")) and (a, al.name) != ("rules", "expand"):
                        raw[o][local] = ((a + "." + al.name).lstrip("."), None); 
                    else: raw[o][local] = (a, al.name)
                    if t: typed[o].add(local)
            elif isinstance(n, ast.Import):
                for al in n.names:
                    local = al.asname or al.name.split(".")[0]
                    ext[o][local + ("" if al.asname else "|" + al.name)] = ("import", al.name, None, al.asname, t)
                    if t: typed[o].add(local)
KEEP = {"rules"}        # packages whose re-exports stay
def resolve(m, name, seen=()):
    """(module short, name) that defines it"""
    if name is None: return (m, None)
    if m in KEEP and name not in (): 
        sub = m + "." + name
        if sub in old and sub != "rules.expand": return (sub, None)
        return (m, name)
    if name in defs.get(m, ()): return (m, name)
    if m in raw and name in raw[m] and (m, name) not in seen:
        t, n = raw[m][name]
        return resolve(t, n, (*seen, (m, name)))
    sub = (m + "." + name).lstrip(".")
    if sub in old: return (sub, None)
    return (m, name)
SYM = getattr(mapping, "SYMBOLS", {})
def home(m): return old2new.get(m) if m not in DROP else "planning"
RENAMES = dict(getattr(mapping, "RENAMES", {}))
# --- identical definitions in one group
def simple(o):
    out = {}
    for n in tree[o].body:
        if isinstance(n, ast.Assign) and len(n.targets) == 1 and isinstance(n.targets[0], ast.Name): out[n.targets[0].id] = ast.unparse(n.value)
    return out
SAME = {}   # (part, name) -> (first part, name)
# --- conflicts
groups = collections.defaultdict(list)
for new, olds in mapping.MAP.items():
    for o in olds:
        groups[new].append(o[:-9] if o.endswith(".__init__") else ("" if o == "__init__" else o))
def origin(o, local):
    if (o, local) in SAME: return ("def", *SAME[o, local])
    if local in defs[o]: return ("def", o, local)
    if local in raw[o]: return ("def", *resolve(*raw[o][local]))
    if local in ext[o]: return ("ext", *ext[o][local][:3])
report = []
BUILT = set(dir(builtins))
def used_builtins(o):
    names = {n.id for n in ast.walk(tree[o]) if isinstance(n, ast.Name)}
    return {n for n in names if n in BUILT and n not in defs[o] and n not in raw[o] and n not in ext[o]}
warn = []
def order(new, parts):
    """parts in an order in which top-level uses come after definitions; primary as early as it can"""
    need = {o: set() for o in parts}
    for o in parts:
        for local, (t, n) in raw[o].items():
            m, _ = resolve(t, n)
            if m in parts and m != o and local not in typed[o]: need[o].add(m)
    out, left = [], list(parts)
    while left:
        for o in left:
            if need[o] <= set(out): out.append(o); left.remove(o); break
        else:
            warn.append(f"{new}: circle among {left}"); out += left; break
    return out
for new, parts in groups.items():
    first = {}
    for o in order(new, parts):
        for name, text in simple(o).items():
            if (o, name) in RENAMES: continue
            if (name, text) in first and first[name, text] != o: SAME[o, name] = (first[name, text], name)
            else: first[name, text] = o
for new, parts in groups.items():
    if len(parts) < 2: continue
    table = collections.defaultdict(dict)
    for o in parts:
        for local in (*defs[o], *raw[o], *[k for k in ext[o]]):
            if local == "__all__": continue
            table[local][o] = origin(o, local)
        for b in used_builtins(o): table[b][o] = ("builtin", b)
    for local, by in table.items():
        by = {o: (('def', og[1], og[2], RENAMES[og[1], og[2]]) if og[0] == 'def' and (og[1], og[2]) in RENAMES else og) for o, og in by.items()}
        if len({(og[3] if len(og) > 3 and og[0] == 'def' else og[:3]) for og in by.values()}) > 1 and sum(1 for og in by.values() if not (og[0] == 'def' and len(og) > 3)) > 1 and len({og for og in by.values() if not (og[0] == 'def' and len(og) > 3)}) > 1:
            # which defs must be renamed: keep the first def (or builtin / external import) and rename the others
            kept = None
            for o, og in by.items():
                if og[0] in ("builtin", "ext"): kept = og
            foreign = [og for og in by.values() if og[0] == "def" and og[1] not in parts]
            for o, og in by.items():
                if og[0] == "def" and og[1] == o and (o, local) not in RENAMES:
                    if kept is None and not foreign: kept = og; continue
                    stem = o.split(".")[-1]
                    RENAMES[o, local] = f"{local}_of_{stem}" if not local.startswith("__") else local
                    report.append((new, local, {k: v for k, v in by.items()}, RENAMES[o, local]))
            # two foreign or external origins: alias in importing part
            others = {og for og in by.values() if og[0] == "ext" or og[0] == "def" and og[1] not in parts}
            if len(others) > 1: report.append((new, local, by, "TWO FOREIGN"))
def final(m, name): return RENAMES.get((m, name), name)
if DRY:
    for r in report: print(r[0], "|", r[1], "|", {k: v for k, v in r[2].items()}, "->", r[3])
    print(len(report)); sys.exit()
# --- rewriting one part
def relative(new_from, new_to, frm_is_pkg):
    a = norm(new_from).split(".") if norm(new_from) else []
    if not frm_is_pkg: a = a[:-1]
    b = norm(new_to).split(".") if norm(new_to) else []
    k = 0
    while k < len(a) and k < len(b) and a[k] == b[k]: k += 1
    if k == len(b) and k == len(a) and b: pass
    dots = "." * (len(a) - k + 1)
    return dots, b[k:]
def import_text(new_from, m, name, local):
    """text of an import of (module m, name) as local, from new file new_from"""
    frm_is_pkg = norm(new_from) in newpkg or norm(new_from) == ""
    if name is None:
        h = home(m); dots, rest = relative(new_from, h, frm_is_pkg)
        leaf = rest[-1] if rest else None
        if leaf is None: raise SystemExit(f"{new_from}: module object of own package {m}")
        return f"from {dots}{'.'.join(rest[:-1])} import {leaf}" + (f" as {local}" if local != leaf else "")
    h = SYM.get((m, name)) or home(m)
    f = final(m, name)
    dots, rest = relative(new_from, h, frm_is_pkg)
    return f"from {dots}{'.'.join(rest)} import {f}" + (f" as {local}" if local != f else "")
def rewrite(o, new):
    """(docstring, body text, imports set, type imports set, all names)"""
    text = src[o]; lines = text.splitlines(keepends=True)
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    scopes = set(wrapper.resolve(ScopeProvider).values()); pos = wrapper.resolve(PositionProvider)
    gs = next(s for s in scopes if isinstance(s, GlobalScope))
    edits = []   # (line, col, endline, endcol, new text)
    def refs(name):
        out = []
        for a in gs.assignments[name]:
            for r in a.references:
                n = r.node
                while isinstance(n, cst.Attribute): n = n.value
                if isinstance(n, cst.Name) and n.value == name: out.append((n, r.scope))
        return out
    ren = {}
    for name in defs[o]:
        if final(o, name) != name: ren[name] = final(o, name)
    modalias = {}
    for local, (t, n) in raw[o].items():
        m, nm = resolve(t, n)
        if nm is None:
            if home(m) == new: modalias[local] = m
            else: modalias[local] = m
            continue
        if (SYM.get((m, nm)) or home(m)) == new and final(m, nm) != local: ren[local] = final(m, nm)
        elif local == n and final(m, nm) != local: ren[local] = final(m, nm)
    seen = set()
    def edit(node, t):
        r = pos[node]; k = (r.start.line, r.start.column)
        if k in seen: return
        seen.add(k); edits.append((r.start.line, r.start.column, r.end.line, r.end.column, t))
    for name, to in ren.items():
        for node, scope in refs(name):
            sc = scope
            while sc is not gs and sc is not None:
                if to in sc.assignments and sc.assignments[to] and not isinstance(sc, GlobalScope): 
                    if any(True for _ in sc.assignments[to]) and to in {a.name for a in sc.assignments}: warn.append(f"{o}: {name} -> {to} shadowed near line {pos[node].start.line}")
                    break
                sc = sc.parent if sc.parent is not sc else None
            edit(node, to)
        # definitions, global statements, __all__ handled below
    class V(cst.CSTVisitor):
        def visit_FunctionDef(self, n): self._d(n)
        def visit_ClassDef(self, n): self._d(n)
        def _d(self, n):
            pass
        def visit_Global(self, n):
            for item in n.names:
                if item.name.value in ren: edit(item.name, ren[item.name.value])
    wrapper.module.visit(V())
    for stmt in wrapper.module.body:   # definitions
        def rename_defs(st):
            if isinstance(st, (cst.FunctionDef, cst.ClassDef)):
                if st.name.value in ren: edit(st.name, ren[st.name.value])
            elif isinstance(st, cst.SimpleStatementLine):
                for sm in st.body:
                    tg = [t.target for t in sm.targets] if isinstance(sm, cst.Assign) else [sm.target] if isinstance(sm, (cst.AnnAssign, cst.AugAssign)) else []
                    for t in tg:
                        for x in ([t] if isinstance(t, cst.Name) else [e.value for e in t.elements] if isinstance(t, cst.Tuple) else []):
                            if isinstance(x, cst.Name) and x.value in ren: edit(x, ren[x.value])
            elif isinstance(st, (cst.If, cst.Try, cst.With, cst.For)):
                for b in getattr(st.body, "body", []): rename_defs(b)
                if getattr(st, "orelse", None) is not None:
                    for b in getattr(st.orelse.body, "body", []): rename_defs(b)
                for h in getattr(st, "handlers", []):
                    for b in h.body.body: rename_defs(b)
        rename_defs(stmt)
    # module aliases: attribute renames, and merged modules
    attrs = []
    class A(cst.CSTVisitor):
        def visit_Attribute(self, n):
            if isinstance(n.value, cst.Name) and n.value.value in modalias: attrs.append(n)
    wrapper.module.visit(A())
    aliasrefs = {id(n) for l in modalias for n, _ in refs(l)}
    for n in attrs:
        if id(n.value) not in aliasrefs: continue
        m = modalias[n.value.value]; mm, nm = resolve(m, n.attr.value)
        if home(m) == new:
            r = pos[n]; edits.append((r.start.line, r.start.column, r.end.line, r.end.column, final(mm, nm)))
        elif nm is not None and (final(mm, nm) != n.attr.value or home(mm) != home(m)):
            if home(mm) != home(m): warn.append(f"{o}: {n.value.value}.{n.attr.value} is of {home(mm)}, not {home(m)} (line {pos[n].start.line})")
            edit(n.attr, final(mm, nm))
    # nested imports
    dropped_stmt = []
    body_nodes = set(map(id, tree[o].body))
    for top in tree[o].body:
        for node in ast.walk(top):
            if node is top or not isinstance(node, (ast.ImportFrom, ast.Import)): continue
            if is_type_block(top): continue
            if isinstance(node, ast.Import): continue
            a = absolute(o, node)
            if a is None: continue
            out = []
            for al in node.names:
                local = al.asname or al.name
                m, nm = resolve(a, al.name) if (a, al.name) == ("rules", "expand") or (a + "." + al.name).lstrip(".") not in old or (a == "" and al.name in ("plan", "verify")) else ((a + "." + al.name).lstrip("."), None)
                if a == "" and o in ("",): pass
                if nm is not None and (SYM.get((m, nm)) or home(m)) == new:
                    if final(m, nm) != local: warn.append(f"{o}:{node.lineno}: nested import of own {nm} as {local}"); out.append(f"{local} = {final(m, nm)}")
                    continue
                if nm is None and home(m) == new: warn.append(f"{o}:{node.lineno}: nested module import of own {m}"); continue
                if a == "" and al.name not in old and nm == al.name and m == "": out.append(f"from {P} import {al.name}" + (f" as {al.asname}" if al.asname else "")); continue
                out.append(import_text(new, m, nm, local))
            edits.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, ("\n" + " " * node.col_offset).join(out) if out else "pass  # MERGED"))
    # apply
    # statements to remove (line ranges)
    remove = set(); names = []; doc = None
    for i, node in enumerate(tree[o].body):
        rng = range(node.lineno, node.end_lineno + 1)
        if i == 0 and isinstance(node, ast.Expr) and isinstance(getattr(node, "value", None), ast.Constant) and isinstance(node.value.value, str):
            doc = node.value.value; remove |= set(rng)
        elif isinstance(node, (ast.Import, ast.ImportFrom)): remove |= set(rng)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (o, node.targets[0].id) in SAME and node.targets[0].id != "__all__": remove |= set(rng)
        elif is_type_block(node):
            if all(isinstance(x, (ast.Import, ast.ImportFrom)) for x in node.body) and not node.orelse: remove |= set(rng)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__" and isinstance(node.value, (ast.List, ast.Tuple)) and all(isinstance(e, ast.Constant) for e in node.value.elts):
            remove |= set(rng); names = [final(*resolve(o, e.value)) if resolve(o, e.value)[1] else e.value for e in node.value.elts]
    out = [list(l) for l in lines]
    data = [l.encode() for l in lines]
    # libcst columns are characters; ast columns are bytes -> text here is mostly ascii on those lines; convert ast edits
    fixed = []
    for (l1, c1, l2, c2, t) in edits:
        fixed.append((l1, c1, l2, c2, t))
    for (l1, c1, l2, c2, t) in sorted(fixed, reverse=True):
        if l1 in remove: continue
        if l1 == l2: lines[l1 - 1] = lines[l1 - 1][:c1] + t + lines[l1 - 1][c2:]
        else:
            lines[l1 - 1] = lines[l1 - 1][:c1] + t + lines[l2 - 1][c2:]
            for k in range(l1, l2): lines[k] = ""
    body = "".join(l for i, l in enumerate(lines, 1) if i not in remove)
    body = re.sub(r"\n\n\n\n+", "\n\n\n", body).strip("\n") + "\n"
    I, T = [], []
    for local, (t, n) in raw[o].items():
        m, nm = resolve(t, n)
        if nm is None and home(m) == new: continue
        if nm is not None and (SYM.get((m, nm)) or home(m)) == new: continue
        if o == "" or o in KEEP and nm is None: 
            pass
        (T if local in typed[o] else I).append(import_text(new, m, nm, final(m, nm) if nm is not None and local == n else local))
    for local, (kind, module, name, asname, t) in ext[o].items():
        if module == "__future__": continue
        text = (f"import {module}" + (f" as {asname}" if asname else "")) if kind == "import" else f"from {module} import {name}" + (f" as {asname}" if asname else "")
        (T if t else I).append(text)
    return doc, body, I, T, names
HEAD = getattr(mapping, "HEADERS", {})
result = {}
for new, parts in groups.items():
    if not parts:
        result[new] = f'"""{HEAD.get(new, norm(new))}"""\n'; continue
    if new in ("",):   # handled by hand: only text replacement
        continue
    I, T, names, bodies, docs = [], [], [], [], {}
    for o in order(new, parts):
        d, b, i, t, n = rewrite(o, new)
        I += i; T += [x for x in t]; names += n; docs[o] = d; bodies.append((o, b))
    T = [t for t in T if t not in I]
    doc = HEAD.get(new) or docs[parts[0]] or norm(new)
    text = '"""' + doc + '"""\n\n'
    if I or T or any(b for _, b in bodies): text += "from __future__ import annotations\n\n"
    def stdfirst(xs): return "\n".join(dict.fromkeys(xs))
    if T and not any("TYPE_CHECKING" in x for x in I): I.append("from typing import TYPE_CHECKING")
    text += stdfirst(I) + "\n\n"
    if T: text += "if TYPE_CHECKING:\n" + "\n".join("    " + x for x in dict.fromkeys(T)) + "\n\n"
    if names: text += "__all__ = [" + ", ".join(f'"{n}"' for n in sorted(set(names), key=lambda n: (not n.isupper(), not n[:1].isupper(), n))) + "]\n\n"
    for k, (o, b) in enumerate(bodies):
        if len(bodies) > 1 and o != parts[0] and docs[o] and new not in getattr(mapping, "PLAIN", ()):
            head = docs[o].strip("\n").split("\n")
            text += "\n# " + "-" * 100 + "\n" + "\n".join(("# " + l).rstrip() for l in head) + "\n# " + "-" * 100 + "\n\n"
        text += b + "\n\n"
    result[new] = text.rstrip() + "\n"
for w in warn: print("WARN", w)
# write
tmp = os.path.join(ROOT, "shardwright.new"); shutil.rmtree(tmp, ignore_errors=True)
for new, text in result.items():
    p = os.path.join(ROOT, "shardwright.new", os.path.relpath(path_of(new), P)); os.makedirs(os.path.dirname(p), exist_ok=True)
    open(p, "w").write(text)
# top __init__
t = src[""]
def top(m):  # dotted in _ROOMS
    return norm(home(m))
out = []
for line in t.splitlines(keepends=True):
    mm = re.match(r"(\s+from )\.([\w.]*) import (.*)", line)
    out.append(line)
open(os.path.join(tmp, "__init__.py"), "w").write(t)
open(mapping.TABLE, "w").write(repr({"home": {o: norm(home(o)) for o in old if home(o) is not None}, "renames": RENAMES, "sym": SYM, "defs": {k: sorted(v) for k, v in defs.items()}, "raw": raw, "ispkg": sorted(ispkg)}))
if os.path.exists(os.path.join(ROOT, P, "py.typed")): shutil.copy(os.path.join(ROOT, P, "py.typed"), tmp)
for d, _, fs in os.walk(os.path.join(ROOT, P)):
    for f in fs:
        if not f.endswith((".py", ".pyc")) and f != "py.typed": print("OTHER FILE", d, f)
