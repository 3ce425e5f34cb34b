#!/bin/sh
# Runs the tests of the CUDA engine on a machine without a GPU: against a driver that emulates one.
# Needs a C++17 compiler; $CXX names it. Arguments go to the test program.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../../../.." && pwd)
kernels=${S4_KERNELS:-$root/crates/s4-codec-gpu/kernels}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"${CXX:-g++}" -std=c++17 -O2 -g -shared -fPIC -fvisibility=hidden -Wall -Wextra -Wno-unknown-pragmas \
  -Wno-parentheses -I "$kernels" -x c++ "$here/driver.cpp" -o "$out/libcuda.so.1"
cd "$root"
LD_LIBRARY_PATH="$out" S4_REQUIRE_GPU=1 cargo test -p s4-engine --test cuda -- "$@"
