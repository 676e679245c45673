#!/usr/bin/env bash
# Everything that only a machine with a large GPU can show, in at most 8 minutes, with nothing downloaded.
#
#   tests/gpu/run.sh              on a GPU; JSON to $OUT (default ./gpu-results), exit code 1 if a part failed
#   tests/gpu/run.sh --dry-run    the same code with tiny shapes on the CPU
#   PARTS="packing delta" tests/gpu/run.sh      some of the parts
#   WHEELS=DIR tests/gpu/run.sh   what is missing is installed from the wheels in DIR, into a folder of its own
#
# Uses the current python3 (or $PYTHON), which has torch with CUDA; the package itself need not be installed.
set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
top="$(cd "$here/../.." && pwd)"
python="${PYTHON:-python3}"
out="${OUT:-./gpu-results}"
parts="${PARTS:-tests packing update delta engine quickstart}"
dry=""
case "${1:-}" in
  "") ;;
  --dry-run) dry="--dry-run" CUDA_VISIBLE_DEVICES=""; export CUDA_VISIBLE_DEVICES ;;
  *) echo "$1: only --dry-run is known" >&2; exit 2 ;;
esac
mkdir -p "$out" || exit 2
out="$(cd "$out" && pwd)"
# Seconds that a part may take; 470 in all.
declare -A limit=([tests]=70 [packing]=50 [update]=140 [delta]=50 [engine]=50 [quickstart]=110)

export PYTHONPATH="$top/src:$top${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
if [ -n "${WHEELS:-}" ]; then
  site="$(mktemp -d)"
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit 2
  export PYTHONPATH="$site:$PYTHONPATH"
fi
"$python" "$here/parts/environment.py" --out "$out" $dry || exit 2

failed=0
for part in $parts; do
  if [ -z "${limit[$part]:-}" ]; then
    echo "PARTS: $part is not one of ${!limit[*]}" >&2
    exit 2
  fi
  rm -f "$out/$part.json"
  begin=$SECONDS
  most=${limit[$part]}
  [ -z "$dry" ] || most=100  # its own limits are for a GPU and a free machine
  timeout --kill-after=5 "$most" "$python" "$here/parts/$part.py" --out "$out" $dry >"$out/$part.out" 2>&1
  code=$?
  took=$((SECONDS - begin))
  [ "$code" = 0 ] || { failed=1; tail -n 15 "$out/$part.out"; }
  echo "$part: exit code $code after $took s"
  "$python" "$here/parts/summary.py" --out "$out" "$part" "$code" "$took" $dry || failed=1
done
exit $failed
