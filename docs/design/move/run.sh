#!/usr/bin/env bash
# Move a clean checkout to the target tree: bash docs/design/move/run.sh ROOT. Needs libcst and ruff; see README.md.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$1"
python "$HERE/package.py" .
git rm -rq --cached shardwright
rm -rf shardwright
mv shardwright.new shardwright
cp "$HERE/package_init.py.txt" shardwright/__init__.py
cp "$HERE/rules_init.py.txt" shardwright/rules/__init__.py
sed -i 's/^from . import counter_rng as generator$/from . import counter_rng  # noqa: F401  (defines the operators)/' shardwright/rules/random.py
sed -i 's/shardwright.cli:main/shardwright.cli.main:main/' pyproject.toml
python "$HERE/users.py" .
ruff check -q --isolated --select I,F401 --fix --line-length 120 --config 'lint.isort.combine-as-imports=true' \
    --exclude shardwright/__init__.py --exclude shardwright/rules/__init__.py shardwright tests benchmarks examples || true
grep -rlE '^ *pass  # MERGED' shardwright | xargs -r sed -i -E '/^ *pass  # MERGED.*$/d'
git add -A shardwright
