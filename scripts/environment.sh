# Finds the Python environment that pipetrain runs in, or makes it. Sourced by launch.sh and the scripts.
#
#     source scripts/environment.sh
#     use_environment run || exit     # or test: the tools that check the code as well
#     "$python" -m pipetrain
#
# An environment that is active and already has pipetrain is taken as it is. Otherwise there is a .venv in the
# checkout, and three files in it say how far it came: pipetrain.unfinished while it is being made, so that a
# set-up that was interrupted or failed is thrown away and never believed; pipetrain.run and pipetrain.test
# once it is whole, with a sum over the files that say what belongs into it, so that a second start asks pip
# nothing. A .venv without these files is somebody's own: it is used, or added to, and never removed.
#
# What runs is this checkout's code, whatever copy of pipetrain the environment holds.

checkout=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
venv=$checkout/.venv

say() { echo "pipetrain: $*" >&2; }

# use_environment run|test: sets `python`, an interpreter that has what running or testing needs.
use_environment() {
    if _has_all python3 "$1"; then
        python=python3
    else
        _is_set_up "$1" || _locked _set_up "$1" || return
        python=$venv/bin/python
    fi
    export PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH}
}

# _has_all PYTHON run|test: whether it finds the packages, the current folder not counted.
_has_all() {
    local modules=(pipetrain torch hydra tensorboard numpy tqdm matplotlib sklearn scipy jinja2 safetensors)
    [[ $2 == run ]] || modules+=(hypothesis mypy pytest ruff)
    "$1" -P -c 'import sys; from importlib.util import find_spec
sys.exit(not all(map(find_spec, sys.argv[1:])))' "${modules[@]}" >/dev/null 2>&1
}

_sum() { cat "$checkout"/{setup.cfg,pyproject.toml,constraints.txt} | cksum; }

_is_set_up() {
    local sum
    if [[ -e $venv/pipetrain.unfinished ]]; then return 1; fi
    if _is_ours; then
        sum=$(cat "$venv/pipetrain.$1" 2>/dev/null) && [[ $sum == "$(_sum)" ]] || return 1
    fi
    _has_all "$venv/bin/python" "$1"
}

_is_ours() { [[ -e $venv/pipetrain.unfinished || -e $venv/pipetrain.run ]]; }

# _locked COMMAND...: runs it while no other start sets up the same .venv.
_locked() {
    (
        if command -v flock >/dev/null; then
            flock -n 9 || { say "another start is setting up .venv: waiting for it" && flock 9; }
        fi
        "$@"
    ) 9<"$checkout/setup.cfg"
}

_set_up() {
    local extra='' ours='' file
    if _is_set_up "$1"; then return; fi # by the start that was waited for
    if [[ -e $venv/pipetrain.unfinished ]]; then
        say "the last set-up of .venv did not finish: starting over"
        rm -rf "$venv"
    elif _is_ours && ! _has_all "$venv/bin/python" run; then
        say "the .venv was made in another place or by another Python: starting over"
        rm -rf "$venv"
    fi
    if [[ ! -e $venv ]]; then
        _check_python || return
        mkdir "$venv" && touch "$venv/pipetrain.unfinished" || return
        say "making $venv with $(python3 --version)"
        python3 -m venv "$venv" || _failed "python3 -m venv" || return
    elif [[ ! -x $venv/bin/python ]]; then
        say "$venv is not a Python environment: remove it and start again"
        return 1
    fi
    if _is_ours; then ours=yes && touch "$venv/pipetrain.unfinished"; fi
    [[ $1 == run ]] || extra='[test]'
    say "installing PyTorch and the rest into .venv: some minutes the first time, gigabytes where it comes with CUDA"
    (cd -- "$checkout" && "$venv/bin/python" -m pip install -q -c constraints.txt -e ".$extra") \
        || _failed "pip install" || return
    _has_all "$venv/bin/python" "$1" || _failed "the new environment lacks packages, so pip install" || return
    if [[ $ours ]]; then
        for file in run ${extra:+test}; do _sum >"$venv/pipetrain.$file" || return; done
        rm "$venv/pipetrain.unfinished"
    fi
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
