//! `ringdisk completions`.
//!
//! Promises: made from the definition of the command line, so no option is missing. Opens and asks
//! nothing; the shell calls `ringdisk ps --targets` for what is served.

use std::io::Write;

use clap::CommandFactory;
use clap_complete::Shell;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::terminal::{self, Results};

use crate::cli::{Cli, CompletionsArgs};

/// Prints the completions of a shell.
///
/// Errors: standard output cannot be written.
pub(crate) fn run(args: &CompletionsArgs) -> Result<(), Failure> {
    // Through memory: the generator panics when its writer fails.
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), terminal::NAME, &mut text);
    let text = with_served(args.shell, String::from_utf8_lossy(&text).into_owned());
    let mut out = Results::lock();
    terminal::ended(out.write_all(text.as_bytes()))?;
    out.finish()
}

/// For bash: what is served is offered beside files.
const BASH: &str = r#"
# Mounts and sockets that are served now.
_ringdisk_served() {
    _ringdisk "$@"
    local word="${COMP_WORDS[COMP_CWORD]}" target
    [[ ${COMP_CWORD} -ge 2 && $word != -* ]] || return 0
    case "${COMP_WORDS[1]}" in
        ctl|umount|topology)
            while IFS= read -r target; do
                [[ $target == "$word"* ]] && COMPREPLY+=("$target")
            done < <(ringdisk ps --targets 2>/dev/null)
            ;;
    esac
    return 0
}
complete -F _ringdisk_served -o bashdefault -o default ringdisk
"#;

/// For fish.
const FISH: &str = r#"
# Mounts and sockets that are served now.
complete -c ringdisk -n "__fish_seen_subcommand_from ctl umount topology" \
    -a "(ringdisk ps --targets 2>/dev/null)"
"#;

/// For zsh, before the lines that use it.
const ZSH: &str = r#"
# Mounts and sockets that are served now, and files.
_ringdisk_served() {
    local -a targets
    targets=(${(f)"$(ringdisk ps --targets 2>/dev/null)"})
    compadd -a targets
    _files
}
"#;

/// Adds what is served now as completions of the commands that take a target.
fn with_served(shell: Shell, text: String) -> String {
    match shell {
        Shell::Bash => text + BASH,
        Shell::Fish => text + FISH,
        Shell::Zsh => {
            let is_target = |line: &str| {
                let line = line.trim_start_matches(['\'', '*', ':']);
                let begins = line.starts_with("target -- ") || line.starts_with("mountpoints -- ");
                begins && line.contains(":_files'")
            };
            let mut lines: Vec<String> = text
                .lines()
                .map(|line| match is_target(line) {
                    true => line.replace(":_files'", ":_ringdisk_served'"),
                    false => line.to_owned(),
                })
                .collect();
            // The last lines call what is above them.
            let end = lines.iter().rposition(|line| line.starts_with("if [ \"$funcstack"));
            lines.insert(end.unwrap_or(lines.len()), ZSH.trim_end().to_owned());
            lines.join("\n") + "\n"
        }
        _ => text,
    }
}
