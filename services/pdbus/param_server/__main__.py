from pdbus.param_server.group import ParamServers
from pdbus.param_server.settings import ParamServerSettings
from pdbus.runtime import run

if __name__ == "__main__":
    raise SystemExit(run(ParamServers, ParamServerSettings))
