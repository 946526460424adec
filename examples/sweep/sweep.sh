#!/bin/sh
# A sweep of twenty runs at four priorities. In `dstackweb queue`, higher priorities are first, equal ones in the order of
# submission. Sign in with `dstackweb login` before. Each sweep needs a name of its own: sweep.sh [NAME]
set -eu
here=$(dirname "$0")
sweep=${1:-sweep}
number=0
for rate in 0.01 0.05 0.1 0.5 0.9; do
    for priority in 30 50 60 70; do
        number=$((number + 1))
        dstackweb apply -f "$here/sweep.yaml" --name "$sweep-$number" --priority "$priority" \
            -e "LEARNING_RATE=$rate" --no-code --yes --detach
    done
done
echo "submitted $number runs; see: dstackweb queue"
