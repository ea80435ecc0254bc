from rpcagent.cli import main

raise SystemExit(main())
