#!/usr/bin/env bash
# The whole story on a laptop: set up, train on the embedded shapes, sample, evaluate. 2 to 4 minutes on two cores with
# native bf16, 4 to 8 with AVX2 alone, excluding installation.
#   bash runs/cpu.sh                              further arguments go to base_train:
#   bash runs/cpu.sh --model_tag=try --num_iterations=50    a short try, as its own run
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

python3 -m scripts.base_train runs/shapes_cpu.py "$@"
case " $* " in *" --help"* | *" -h "*) exit ;; esac

# Draw 400 samples once, into the run's folder; measure their form, class accuracy, precision and recall
find_trained shapes_cpu "$@"
python3 -m scripts.sample --model="$run" --num_images=400 --npz --out="$samples"
python3 -m scripts.base_eval --metric=well_formed --samples="$samples" --data=shapes
python3 -m scripts.base_eval --metric=fd_classifier --samples="$samples" --data=shapes --reference_split=val
python3 -m scripts.report "$run" > /dev/null  # again, now with these figures
cat << END
the picture:  ${samples%.npz}.png
the report:   $folder/report.html
the page:     $(command -v python3) -m scripts.sample_web --model=$run
then:         $(command -v python3) -m scripts.sample --model=$run --classes=ring --num_images=16
END
