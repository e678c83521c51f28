# Finds the Python environment that pipetrain runs in, or makes it. Sourced by launch.sh and the scripts.
#
#     source scripts/environment.sh
#     use_environment run || exit     # or compare: what scripts/compare.py needs as well; or test: the tools that check the code
#     "$python" -m pipetrain
#
# An environment that is active and already has pipetrain is taken as it is. Otherwise there is a .venv in the
# checkout. One that we made holds a file: empty while it is being made, so that a set-up that was interrupted or
# failed is thrown away; then what was installed, with a sum over the files that say so, so that a second start
# asks pip nothing. A .venv without this file is somebody's own: it is used, or added to, and never removed.
#
# What runs is this checkout's code, whatever copy of pipetrain the environment holds.

checkout=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
venv=$checkout/.venv
made=$venv/pipetrain.made

say() { echo "pipetrain: $*" >&2; }

# use_environment run|compare|test: sets `python`, an interpreter that has what this needs.
use_environment() {
    python=python3
    if ! _has_all "$1"; then
        python=$venv/bin/python
        (
            if command -v flock >/dev/null; then
                flock -n 9 || { say "another start is setting up .venv: waiting for it" && flock 9; }
            fi
            _set_up "$1"
        ) 9<"$checkout/setup.cfg" || return
    fi
    export PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH}
}

# _has_all run|compare|test: whether `python` finds the packages, the current folder not counted.
_has_all() {
    local modules=(pipetrain torch hydra tensorboard numpy tqdm matplotlib safetensors)
    [[ $1 == run ]] || modules+=(jinja2 scipy)
    [[ $1 != test ]] || modules+=(hypothesis importlinter mypy pdoc pytest ruff xdist)
    "$python" -P -c 'import sys; from importlib.util import find_spec
sys.exit(not all(map(find_spec, sys.argv[1:])))' "${modules[@]}" >/dev/null 2>&1
}

_set_up() {
    local sum extra=''
    sum=$(cat "$checkout"/{setup.cfg,pyproject.toml,constraints.txt} | cksum)
    if [[ ! -e $made ]] || grep -qxF "$1 $sum" "$made"; then
        if _has_all "$1"; then return; fi
    fi
    if [[ -e $made ]] && ! { [[ -s $made ]] && _has_all run; }; then
        say "the last set-up of .venv did not finish, or it has been moved: starting over"
        rm -rf "$venv"
    fi
    if [[ ! -e $venv ]]; then
        _check_python || return
        say "making $venv with $(python3 --version)"
        mkdir "$venv" && touch "$made" && python3 -m venv "$venv" || _failed "python3 -m venv" || return
    elif [[ ! -x $python ]]; then
        say "$venv is not a Python environment: remove it and start again"
        return 1
    fi
    if [[ -e $made ]]; then : >"$made"; fi
    [[ $1 == run ]] || extra="[$1]"
    say "installing PyTorch and the rest into .venv: some minutes the first time, gigabytes where it comes with CUDA"
    (cd -- "$checkout" && "$python" -m pip install -q -c constraints.txt -e ".$extra") \
        && _has_all "$1" || _failed "pip install" || return
    if [[ -e $made ]]; then printf '%s\n' "run $sum" ${extra:+"compare $sum"} "$1 $sum" >"$made"; fi
    say ".venv is ready"
}

_check_python() {
    if ! command -v python3 >/dev/null; then
        say "there is no python3: install Python 3.11 or newer"
    elif ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        say "$(python3 --version) is too old: put Python 3.11 or newer on the PATH as python3"
    elif ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
        say "python3 cannot make environments, for it lacks ensurepip: on Debian, apt install python3-venv"
    else
        return 0
    fi
    return 1
}

_failed() {
    say "$1 failed, its reason is above; start again to try again"
    return 1
}
