#!/usr/bin/env bash
# Builds the Dockerfile and trains in the image, without Docker and without a registry of images: by buildah, on a base image made of Debian's
# packages and this machine's Rust toolchain. Needs root, and Debian's buildah and debootstrap. Takes some minutes, and 6 GB in /var/tmp.
#
#   deploy/try-image.sh
set -euo pipefail
for program in buildah debootstrap cargo; do
  command -v "$program" >/dev/null || { echo "no $program: apt-get install buildah debootstrap" >&2; exit 3; }
done
[ "$(id -u)" = 0 ] || { echo "debootstrap needs root" >&2; exit 3; }
cd "$(dirname "$0")/.."

dir=$(mktemp -d /var/tmp/lockstep-image.XXXXXX)
buildah() { command buildah --root "$dir/root" --runroot "$dir/run" --storage-driver vfs "$@"; }
clean() {
  buildah rm --all >/dev/null 2>&1 || true
  rm -rf "$dir"
}
trap clean EXIT
export BUILDAH_ISOLATION=chroot

# The base image that the Dockerfile names, with the toolchain that is here.
base=$(sed -n 's/^FROM \(rust:[^ ]*\) AS build$/\1/p' Dockerfile)
echo "== $base from Debian's packages and $(rustc --version)"
debootstrap --variant=minbase --include=gcc,libc6-dev,binutils,ca-certificates bookworm "$dir/debian" >"$dir/debootstrap.log"
mkdir -p "$dir/debian/usr/local/cargo"
cp -r "$(rustc --print sysroot)/." "$dir/debian/usr/local/"
rm -rf "$dir/debian/usr/local/share/doc"
tar -C "$dir/debian" -cf "$dir/base.tar" .
rm -rf "$dir/debian"
container=$(buildah from scratch)
buildah add --quiet "$container" "$dir/base.tar" / >/dev/null
rm "$dir/base.tar"
buildah config --env PATH=/usr/local/cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --env CARGO_HOME=/usr/local/cargo "$container"
buildah commit --quiet --rm "$container" "docker.io/library/$base" >/dev/null

echo "== the Dockerfile"
image=$(sed -n 's/^# *docker build -t \([^ ]*\) .*/\1/p' Dockerfile)
# Crates that are here are not downloaded again.
registry=${CARGO_HOME:-$HOME/.cargo}/registry
buildah bud --pull-never --volume "$registry:/usr/local/cargo/registry" \
  --build-arg "LOCKSTEP_COMMIT=$(git rev-parse HEAD 2>/dev/null || true)" -t "$image" .

echo "== training in the image"
mkdir -m 777 "$dir/work"
for _ in $(seq 2000); do echo 'All ranks wait until the last gradient is reduced.'; done >"$dir/work/text.txt"
cat >"$dir/work/run.toml" <<'RUN'
[model]
preset = "llama-15m"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
[data]
train = ["text.txt"]
[train]
steps = 20
global_batch = 4
seq_len = 32
RUN
container=$(buildah from --pull-never "$image")
buildah run --volume "$dir/work:/work" "$container" -- lockstep --version
buildah run --volume "$dir/work:/work" "$container" -- lockstep train run.toml --nproc-per-node 2
buildah run --volume "$dir/work:/work" "$container" -- lockstep generate --model checkpoints/step-00000020 --prompt All --max-new-tokens 8
test -f "$dir/work/checkpoints/step-00000020/manifest.json"
echo "== ok: $image, $(buildah images --format '{{.Size}}' "$image")"
