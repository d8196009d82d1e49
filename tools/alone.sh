#!/bin/sh
# alone.sh PLUGIN: runs a plugin's suite where nothing of this repository is installed but the wheels of the core and
# of that plugin. The tests are copied away, so that neither the working directory nor a conftest leads to the sources.
set -eu

plugin=$1
root=$PWD
site=$root/build/alone/$plugin
work=$root/build/alone/$plugin-tests
HICACHE_EXPECT_PLUGINS=hicache-$(printf %s "$plugin" | tr _ -)
export HICACHE_EXPECT_PLUGINS

rm -rf "$site" "$work"
mkdir -p "$work"
"$root/.deps/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$site" \
	"$root"/build/wheels/hicache_core-*.whl "$root"/build/wheels/hicache_"$plugin"-*.whl
cp -R "plugins/$plugin/tests" "$work/tests"
cp pyproject.toml "$work"

cd "$work"
export PYTHONPATH="$site"
"$root/.deps/bin/python" "$root/tools/only_plugin.py" "$site" "$HICACHE_EXPECT_PLUGINS"
"$root/.deps/bin/python" -m pytest -c pyproject.toml -p no:cacheprovider tests
