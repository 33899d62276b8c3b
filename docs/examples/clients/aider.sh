# aider: one message about a file, without edits.
# pip install aider-chat
cd "$(mktemp -d)" && git init -q . && echo "x = 1" > a.py
export OPENAI_API_BASE=$URL/v1 OPENAI_API_KEY=none
aider --model openai/tiny-dense --no-auto-commits --no-stream --map-tokens 0 --yes-always --no-check-update \
  --no-analytics --edit-format ask --no-show-model-warnings --message "Hi" < /dev/null | tee log
grep -q "Tokens:" log
