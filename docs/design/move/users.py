"""Rewrite imports, names and paths outside of the package, after package.py: ``python users.py ROOT``; see README.md."""
import ast, glob, os, re, sys

import tree
import libcst as cst
from libcst.metadata import MetadataWrapper, ScopeProvider, PositionProvider, GlobalScope
ROOT = sys.argv[1]; P = "shardwright"
tab = eval(open(tree.TABLE).read())
home, RN, defs, raw = tab["home"], tab["renames"], {k: set(v) for k, v in tab["defs"].items()}, tab["raw"]
KEEP = {"rules"}
def resolve(m, name, seen=()):
    if m in KEEP:
        return ((m + "." + name, None) if m + "." + name in home and name != "expand" else (m, name))
    if name in defs.get(m, ()): return (m, name)
    if m in raw and name in raw[m] and (m, name) not in seen:
        t, n = raw[m][name]
        if n is None: return (t, None)
        return resolve(t, n, (*seen, (m, name)))
    sub = (m + "." + name).lstrip(".")
    if sub in home: return (sub, None)
    return (m, name)
def final(m, n): return RN.get((m, n), n)
def dotted(m): h = home[m]; return P + ("." + h if h else "")
PUBLIC = None
def imp(m, nm, local):
    if nm is None:
        d = dotted(m); pkg, leaf = d.rsplit(".", 1)
        return f"from {pkg} import {leaf}" + (f" as {local}" if leaf != local else "")
    f = final(m, nm)
    return f"from {dotted(m)} import {f}" + (f" as {local}" if f != local else "")
def strings(text):
    """dotted paths of old modules in strings and prose"""
    def sub(mt):
        parts = mt.group(0).split(".")[1:]
        for k in range(len(parts), 0, -1):
            m = ".".join(parts[:k])
            if m in home and not (k == 1 and m in ("plan", "verify")):
                rest = parts[k:]
                if rest:
                    mm, nm = resolve(m, rest[0])
                    if nm is None: continue
                    return ".".join([dotted(mm), final(mm, nm), *rest[1:]])
                return dotted(m)
        return mt.group(0)
    text = re.sub(r"(?<!ops\.)\bshardwright(?:\.[A-Za-z_]\w*)+", sub, text)
    def path(mt):
        m = mt.group(1).replace("/", ".")
        if m in home:
            h = home[m]; return "shardwright/" + h.replace(".", "/") + ".py"
        return mt.group(0)
    return re.sub(r"\bshardwright/([\w/]+)\.py", path, text)
def run(path):
    text = open(path).read()
    try: parsed = ast.parse(text)
    except SyntaxError: print("skip", path); return
    if "shardwright" not in text: return
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    scopes = set(wrapper.resolve(ScopeProvider).values()); pos = wrapper.resolve(PositionProvider)
    gs = next(s for s in scopes if isinstance(s, GlobalScope))
    edits, ren, modalias, seen = [], {}, {}, set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module and (node.module == P or node.module.startswith(P + ".")):
            a = node.module[len(P) + 1:]
            top = node in parsed.body
            out = {}
            for al in node.names:
                local = al.asname or al.name
                sub = (a + "." + al.name).lstrip(".")
                if a == "" and (sub not in home or al.name in ("plan", "verify") ): out.setdefault(P, []).append(al.name + (f" as {al.asname}" if al.asname else "")); continue
                if a in KEEP and (sub not in home or sub == "rules.expand"): out.setdefault(node.module, []).append(al.name + (f" as {al.asname}" if al.asname else "")); continue
                m, nm = (sub, None) if sub in home and sub != "plan.plan" or (sub in home and a != "plan") else resolve(a, al.name)
                if nm is None:
                    modalias[local] = m
                    d = dotted(m); pkg, leaf = d.rsplit(".", 1)
                    out.setdefault(pkg, []).append(leaf + (f" as {local}" if leaf != local else "")); continue
                f = final(m, nm); target = dotted(m)
                if not al.asname and f != local and top: ren[local] = f; local2 = f
                else: local2 = local
                if m not in home: print("??", path, m, nm)
                out.setdefault(target, []).append(f + (f" as {local2}" if f != local2 else ""))
            ind = " " * node.col_offset
            last = text.splitlines()[node.end_lineno - 1][node.end_col_offset:]
            noqa = "  # noqa: E402" if "noqa" in last else ""
            st = []
            for t, ns in out.items():
                ns = list(dict.fromkeys(ns))
                one = f"from {t} import {', '.join(ns)}"
                if len(one) + len(ind) > 118: one = f"from {t} import (" + f"{noqa}\n{ind}    " + f",\n{ind}    ".join(ns) + f",\n{ind})"; st.append(one)
                else: st.append(one + (noqa if not t == list(out)[-1] else ""))
            edits.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, ("\n" + ind).join(st)))
    def refs(name):
        for a in gs.assignments[name]:
            for r in a.references:
                n = r.node
                while isinstance(n, cst.Attribute): n = n.value
                if isinstance(n, cst.Name) and n.value == name: yield n
    for name, to in ren.items():
        for n in refs(name):
            r = pos[n]; k = (r.start.line, r.start.column)
            if k in seen: continue
            seen.add(k); edits.append((r.start.line, r.start.column, r.end.line, r.end.column, to))
    class A(cst.CSTVisitor):
        def visit_Attribute(self, n):
            if isinstance(n.value, cst.Name) and n.value.value in modalias:
                m = modalias[n.value.value]; mm, nm = resolve(m, n.attr.value)
                if nm and final(mm, nm) != n.attr.value:
                    r = pos[n.attr]; edits.append((r.start.line, r.start.column, r.end.line, r.end.column, final(mm, nm)))
    if modalias: wrapper.module.visit(A())
    lines = text.splitlines(keepends=True)
    for (l1, c1, l2, c2, t) in sorted(set(edits), reverse=True):
        lines[l1 - 1] = lines[l1 - 1][:c1] + t + lines[l2 - 1][c2:]
        for k in range(l1, l2): lines[k] = ""
    new = "".join(lines)
    # strings that are not import statements
    out = []
    for line in new.splitlines(keepends=True):
        out.append(line if re.match(r"\s*from shardwright", line) else strings(line))
    new = "".join(out)
    if new != text: open(path, "w").write(new)
if __name__ == "__main__":
    for d in ("tests", "benchmarks", "examples", "docs"):
        for p in sorted(glob.glob(os.path.join(ROOT, d, "**", "*.py"), recursive=True)): run(p)
    for p in glob.glob(os.path.join(ROOT, "*.md")) + glob.glob(os.path.join(ROOT, "docs", "**", "*.md"), recursive=True) + glob.glob(os.path.join(ROOT, "benchmarks", "*.md")) + [os.path.join(ROOT, "Makefile")]:
        t = open(p).read(); n = strings(t)
        if n != t: open(p, "w").write(n)
    for p in glob.glob(os.path.join(ROOT, "shardwright", "**", "*.py"), recursive=True):
        t = open(p).read(); n = "".join(l if re.match(r"\s*(from|import) ", l) else strings(l) for l in t.splitlines(keepends=True))
        if n != t: open(p, "w").write(n)
