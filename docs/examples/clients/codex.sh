# Codex CLI: `codex exec` with the server as a provider over responses.
# npm install @openai/codex
export CODEX_HOME="$(mktemp -d)" && cd "$CODEX_HOME" && mkdir work
cat > config.toml << EOF
model = "tiny-dense"
model_provider = "d"
model_context_window = 65536
[model_providers.d]
name = "d"
base_url = "$URL/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
EOF
codex exec --skip-git-repo-check -C work --json "Hi" < /dev/null | tee log
grep -q '"turn.completed"' log
