#!/usr/bin/env bash
# Train with N processes on this machine:  launch/local.sh N [CONFIG] [a.b=value ...] [--resume ...]
#
# Ends with the code of the process that failed first, or 0. JAX_NUM_CPU_DEVICES says how many CPU devices each gets.
# Ctrl-C, TERM, USR1 and USR2 are passed on to every process: docs/operations.md says what they mean.
set -um # job control: without it, processes in the background ignore Ctrl-C
if [[ $# -lt 1 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: launch/local.sh N [CONFIG] [a.b=value ...]" >&2
    exit 2
fi
count=$1
shift
free_port='import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
export MMJAX_COORDINATOR=${MMJAX_COORDINATOR:-127.0.0.1:$(python -c "$free_port")} MMJAX_PROCESSES=$count

declare -A number=()
for name in INT TERM USR1 USR2; do
    # shellcheck disable=SC2064 # the name now, the numbers then
    trap "kill -$name \"\${!number[@]}\" 2>/dev/null" "$name"
done
for ((i = 0; i < count; i++)); do
    MMJAX_PROCESS=$i python -m mmjax.train "$@" &
    number[$!]=$i
done

code=0
while ((${#number[@]})); do
    wait -n -p ended "${!number[@]}"
    status=$?
    [[ -n ${ended:-} ]] || continue # a signal came, which all processes have got
    if ((status && !code)); then
        code=$status
        echo "launch: process ${number[$ended]} of $count ended first, with code $status" >&2
        others=("${!number[@]}")
        # They end by themselves: where one was killed within seconds, unless they wait for it to join them.
        { sleep $((status > 128 ? 5 : 60)) && kill -KILL "${others[@]}"; } 2>/dev/null &
        killer=$!
    fi
    unset "number[$ended]"
done
[[ -n ${killer:-} ]] && pkill -P "$killer" 2>/dev/null
exit "$code"
