#!/bin/sh
# Compiles every AscendC source of an artifact with CANN's bisheng: ascend_bisheng.sh ARTIFACT OUTPUT
# Needs CANN 9.2 on the path and TileLang installed for its headers. Never run by its authors.
set -eu
artifact=$1 output=$2
mkdir -p "$output"
headers=$(python3 -c 'import importlib.util as u; print(u.find_spec("tilelang").submodule_search_locations[0] + "/src")')
python3 -c 'from tilewright.targets.registry import resolve
import sys
for name, text in resolve("ascend950")[1].support_sources().items():
    open(sys.argv[1] + "/" + name, "w").write(text)' "$output"
for source in "$artifact"/sources/*.asc; do
  name=$(basename "$source" .asc)
  echo "$name"
  bisheng -x asc -O2 -fPIC --npu-arch=dav-3510 -ffp-contract=off -std=c++17 -I"$output" -I"$headers" \
    -c "$source" -o "$output/$name.o"
done
