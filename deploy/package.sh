#!/usr/bin/env bash
# Builds one static binary, which needs no library of the machine it runs on, and packs it with the book, the recipes and the manifests:
#
#   deploy/package.sh [--target musl|gnu] [DIR]     # DIR (default: dist) gets lockstep-VERSION-MACHINE-linux.tar.gz, .sha256, and lockstep
#
# musl is taken where Rust's standard library for it is installed, or rustup can install it; else glibc, linked statically. Both are tried
# in an empty root directory before they are packed.
set -euo pipefail

dir=dist
libc=
while [ $# -gt 0 ]; do
  case $1 in
    --target) libc=${2:?--target musl or gnu}; shift 2 ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "$0: no flag $1; --help lists them" >&2; exit 2 ;;
    *) dir=$1; shift ;;
  esac
done
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
cd "$(dirname "$0")/.."

# The target triple: musl if its standard library is there.
machine=$(uname -m)
has_musl() { [ -d "$(rustc --print sysroot)/lib/rustlib/$machine-unknown-linux-musl/lib" ]; }
if [ -z "$libc" ]; then
  has_musl || rustup target add "$machine-unknown-linux-musl" >/dev/null 2>&1 || true
  if has_musl; then libc=musl; else libc=gnu; fi
fi
case $libc in
  musl)
    has_musl || { echo "no standard library for musl: rustup target add $machine-unknown-linux-musl, or --target gnu" >&2; exit 3; }
    ;;
  gnu) echo "package: no standard library for musl here; linking glibc statically" >&2 ;;
  *) echo "--target $libc: musl or gnu" >&2; exit 2 ;;
esac
target=$machine-unknown-linux-$libc

# Both C libraries are linked statically; paths of this machine are left out of the binary, so that equal sources give equal bytes.
export RUSTFLAGS="-C target-feature=+crt-static --remap-path-prefix=$PWD=lockstep --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo"
cargo build --release --locked --package lockstep --target "$target"
binary=${CARGO_TARGET_DIR:-target}/$target/release/lockstep

# Nothing but the kernel may be needed: no interpreter, and it runs where there is no other file.
if readelf --program-headers "$binary" | grep -q INTERP; then
  echo "package: $binary asks for a dynamic linker" >&2
  exit 1
fi
version=$("$binary" --version | cut -d' ' -f2)
name=lockstep-$version-$machine-linux
staged=$(mktemp -d)
trap 'rm -rf "$staged"' EXIT
if [ "$(id -u)" = 0 ] && command -v chroot >/dev/null; then
  install -D "$binary" "$staged/empty/lockstep"
  chroot "$staged/empty" /lockstep --version >/dev/null
fi

mkdir "$staged/$name"
cp -r README.md CHANGELOG.md LICENSE docs recipes deploy "$staged/$name/"
install "$binary" "$staged/$name/lockstep"
mkdir "$staged/$name/completions"
for shell in bash zsh fish; do
  "$binary" completions "$shell" >"$staged/$name/completions/lockstep.$shell"
done
"$binary" schema >"$staged/$name/run.schema.json"
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}" \
  -C "$staged" -c "$name" | gzip -n >"$dir/$name.tar.gz"
(cd "$dir" && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
install "$binary" "$dir/lockstep"
echo "$dir/$name.tar.gz: $(du -h "$dir/$name.tar.gz" | cut -f1), $target"
