from glmquant.cli import main

raise SystemExit(main())
