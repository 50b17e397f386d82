"""Chat templates of the families that transformers ships or documents, and of popular ones, shortened.

Each writes headers, generation prompts, ends of turns, system messages, tools and earlier thoughts as its original.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A template and what is known of it from elsewhere.

    Attributes:
        template: Jinja.
        end: what a model has to say to end its turn.
        written: what it makes of what is said.
        system: whether it can write such a message.
        thought: what it writes between the generation prompt and an answer.
        rewrites: whether an earlier answer is written differently from the last.
        eos: the tokenizer's end token.
    """

    template: str
    end: str
    written: Callable[[str], str] = str
    system: bool = True
    thought: str = ""
    rewrites: bool = False
    eos: str = "</s>"


_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

_LLAMA_3 = (
    "{{ bos_token }}{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\n' + (tools | tojson) + "
    "'<|eot_id|>' }}{% endif %}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}{% if message.tool_calls %}"
    "{{ '<|python_tag|>' + (message.tool_calls[0].function | tojson) + '<|eom_id|>' }}"
    "{% else %}{{ message.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

_MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)

_MISTRAL_TOOLS = (
    "{{ bos_token }}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% if tools and message == users[-1] %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + message.content + '[/INST]' }}{% elif message.tool_calls %}"
    "{{ '[TOOL_CALLS] ' + (message.tool_calls | map(attribute='function') | list | tojson) + eos_token }}"
    "{% elif message.role == 'tool' %}{{ '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ ' ' + message.content | trim + eos_token }}{% endif %}{% endfor %}"
)

_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set first = '' %}{% set loop_messages = messages %}{% endif %}"
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') + message['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

_PHI_3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)

_ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

_QWEN_2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_QWEN_3 = (
    "{%- if tools %}{{- '<|im_start|>system\n<tools>' + (tools | tojson) + '</tools><|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(last=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}"
    "{%- set content = message.content if message.content is string else '' %}"
    "{%- if message.role in ('user', 'system') %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set thought = '' %}"
    "{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

_DEEPSEEK_V3 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}{% endif %}"
    "{% endfor %}{% for message in messages %}{% if message.role == 'user' %}{{ '<｜User｜>' + message.content }}"
    "{% elif message.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)

_VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}{% set said = messages[1:] %}"
    "{% else %}{{ 'A chat between a curious user and an assistant. ' }}{% set said = messages %}{% endif %}"
    "{% for message in said %}{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

_ALPACA = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '### Instruction:\n' + message['content'] + '\n\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ '### Response:\n' + message['content'] + '\n\n' }}{% else %}{{ message['content'] + '\n\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)

_GRANITE = (
    "{% for message in messages %}{{ '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + "
    "'<|end_of_text|>\n' }}{% if loop.last and add_generation_prompt %}"
    "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}{% endfor %}"
)

_COMMAND_R = (
    "{{ bos_token }}{% for message in messages %}{% set role = {'user': 'USER', 'assistant': 'CHATBOT'}.get("
    "message['role'], 'SYSTEM') %}{{ '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' }}"
    "{% if role == 'CHATBOT' %}{{ '<|START_RESPONSE|>' + message['content'].strip() + '<|END_RESPONSE|>' }}"
    "{% else %}{{ message['content'].strip() }}{% endif %}{{ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)

_GLM_4 = (
    "{{ '[gMASK]<sop>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# As in the documentation of transformers, which leaves the end of the turn outside.
_MARKED = (
    "{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- generation -%}{{- message['content'] -}}{%- endgeneration -%}{{- '<|im_end|>\n' -}}{%- else -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)

FAMILIES = {
    "chatml": Family(_CHATML, "<|im_end|>"),
    "smollm2": Family(_QWEN_2, "<|im_end|>", eos="<|im_end|>"),
    "qwen2": Family(_QWEN_2, "<|im_end|>", eos="<|im_end|>"),
    "qwen3": Family(
        _QWEN_3,
        "<|im_end|>",
        lambda said: said.lstrip("\n"),
        thought="<think>\n\n</think>\n\n",
        rewrites=True,
        eos="<|im_end|>",
    ),
    "llama2": Family(_LLAMA_2, " </s>", written=str.strip, thought=" "),
    "llama3": Family(_LLAMA_3, "<|eot_id|>", written=str.strip),
    "mistral": Family(_MISTRAL, "</s>", system=False),
    "mistral-tools": Family(_MISTRAL_TOOLS, "</s>", written=str.strip, system=False, thought=" "),
    "gemma": Family(_GEMMA, "<end_of_turn>", written=str.strip),
    "phi3": Family(_PHI_3, "<|end|>", eos="<|endoftext|>"),
    "zephyr": Family(_ZEPHYR, "</s>"),
    "deepseek-v3": Family(_DEEPSEEK_V3, "<｜end▁of▁sentence｜>"),
    "vicuna": Family(_VICUNA, "</s>", thought=" "),
    "alpaca": Family(_ALPACA, "</s>"),
    "granite": Family(_GRANITE, "<|end_of_text|>", eos="<|end_of_text|>"),
    "command-r": Family(
        _COMMAND_R, "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", written=str.strip, thought="<|START_RESPONSE|>"
    ),
    "glm4": Family(_GLM_4, "<|endoftext|>", eos="<|endoftext|>"),
    "marked": Family(_MARKED, "<|im_end|>"),
}

SPECIAL = (
    *("<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>"),
    *("<|system|>", "<|end|>", "<tool_call>", "</tool_call>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    *("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    *("[gMASK]", "<sop>", "[TOOL_CALLS]", "<think>", "</think>"),
)
