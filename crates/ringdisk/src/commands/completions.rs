//! `ringdisk completions`.

use std::io::Write;

use clap::CommandFactory;
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
    let mut out = Results::lock();
    terminal::ended(out.write_all(&text))?;
    out.finish()
}
