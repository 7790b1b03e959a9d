import sys

from harness.experiments.command import main

sys.exit(main())
