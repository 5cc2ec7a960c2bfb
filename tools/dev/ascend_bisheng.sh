#!/bin/sh
# Compiles the AscendC of an artifact with CANN's bisheng, for dav-3510, and a driver that runs its
# kernels on recorded operands and compares what they leave:
#   ascend_bisheng.sh ARTIFACT OUTPUT [CASES]
# Needs CANN 9.2 (its set_env.sh sourced: ASCEND_HOME_PATH), and TileLang installed for its headers.
# With CASES (ascend_cases.py) it also runs the driver on card 0. Never run by its authors: no step
# of it has met CANN or a card.
set -eu
artifact=$1 output=$2 cases=${3:-}
: "${ASCEND_HOME_PATH:?want the folder of CANN: source its set_env.sh first}"
mkdir -p "$output"
headers=$(python3 -c 'import importlib.util as u; print(u.find_spec("tilelang").submodule_search_locations[0] + "/src")')
python3 -c 'from tilewright.codegen.emit.cpp import TEMPLATE_ROOT
from tilewright.targets.registry import resolve
import shutil, sys
shutil.copy(TEMPLATE_ROOT / "ascendc" / "tw_ascend_driver.cpp", sys.argv[1])
for name, text in resolve("ascend950")[1].support_sources().items():
    open(sys.argv[1] + "/" + name, "w").write(text)' "$output"
for source in "$artifact"/sources/*.asc; do
  name=$(basename "$source" .asc)
  echo "$name"
  bisheng -x asc -O2 -fPIC --npu-arch=dav-3510 -ffp-contract=off -std=c++17 \
    -I"$output" -I"$headers" -I"$ASCEND_HOME_PATH/include" -c "$source" -o "$output/$name.o"
done
bisheng -shared --npu-arch=dav-3510 "$output"/*.o -o "$output/kernels.so" \
  -L"$ASCEND_HOME_PATH/lib64" -lascendcl
c++ -std=c++17 -O2 -I"$ASCEND_HOME_PATH/include" "$output/tw_ascend_driver.cpp" \
  -o "$output/driver" -L"$ASCEND_HOME_PATH/lib64" -lascendcl -ldl
if [ -n "$cases" ]; then
  "$output/driver" "$output/kernels.so" "$cases"
fi
