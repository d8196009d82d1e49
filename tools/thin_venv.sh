#!/bin/sh
# thin_venv.sh PROJECT...: makes .venv, which sees the packages of .deps and has each PROJECT installed editable.
# Torch is thus installed once, and .deps stays free of hicache for suites that run against wheels.
set -eu

purelib() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

.deps/bin/python -m venv --clear --without-pip .venv
printf "import site; site.addsitedir('%s')\n" "$(purelib .deps/bin/python)" > "$(purelib .venv/bin/python)/deps.pth"

for project; do
	set -- "$@" --editable "./$project"
	shift
done
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation "$@"
