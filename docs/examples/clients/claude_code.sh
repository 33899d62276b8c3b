# Claude Code: `claude -p` with the server in place of Anthropic's.
# npm install @anthropic-ai/claude-code
export HOME="$(mktemp -d)" && cd "$HOME"
export ANTHROPIC_BASE_URL=$URL ANTHROPIC_API_KEY=none
export ANTHROPIC_MODEL=tiny-dense ANTHROPIC_SMALL_FAST_MODEL=tiny-dense DISABLE_TELEMETRY=1
export DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_MAX_OUTPUT_TOKENS=2048
claude -p "Hi" --output-format json < /dev/null | tee log
grep -q '"is_error":false' log
