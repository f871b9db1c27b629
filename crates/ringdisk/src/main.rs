//! ringdisk: serves a disk image, in place, as an ordinary file, to virtual machines or to NBD
//! clients.
//!
//! Promises: every way out has one of the exit codes of [`Exit`]; nothing that comes from
//! the command line, the environment, an image or the system ends in a panic. Standard streams that
//! were closed at the start are `/dev/null` (the Rust runtime opens them before `main`), and a
//! broken pipe is an error like any other (the runtime ignores SIGPIPE).

#![forbid(unsafe_code)]

mod cli;
mod commands;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use ringdisk_console::log;
use ringdisk_console::operation::end_by_signal;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper::{self, start::Role};
use ringdisk_daemon::{limits, terminal, unmount};
use ringdisk_observe::metrics;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    ExitCode::from(run())
}

/// Why a command did not do what it was told.
pub(crate) enum End {
    /// The words make no sense together.
    Usage(clap::Error),
    Failed(Failure),
}

impl From<clap::Error> for End {
    fn from(error: clap::Error) -> End {
        End::Usage(error)
    }
}

impl From<Failure> for End {
    fn from(failure: Failure) -> End {
        End::Failed(failure)
    }
}

/// Runs the command and gives the exit code.
fn run() -> u8 {
    if Role::Helper.is_ours() {
        return helper::run();
    }
    if Role::Detach.is_ours() {
        return unmount::run_detacher();
    }
    let mut words = std::env::args_os();
    let program = words.next().unwrap_or_default();
    if commands::qemu_nbd::is_named_so(&program) {
        return commands::qemu_nbd::run(&program.to_string_lossy(), words);
    }
    if commands::qemu_img::is_named_so(&program) {
        return commands::qemu_img::run(&program.to_string_lossy(), words);
    }
    let given = match given_words(&program, words) {
        Ok(Some(given)) => given,
        // mount(8) only asks whether it would work.
        Ok(None) => return Exit::Clean.code(),
        Err(code) => return code,
    };
    let file = cli::config::with_file(&given);
    let parsed = cli::config::expand(given).and_then(Cli::try_parse_from);
    let mut cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            let code = usage(&cli::with_suggestion(error));
            if let Some(text) = file.filter(|_| code != Exit::Clean.code()) {
                terminal::note(text);
            }
            return code;
        }
    };
    if let Command::Mount(args) = &mut cli.command
        && let Err(error) = args.take_name()
    {
        return usage(&error);
    }
    // `ringdisk nbd` writes the log as `qemu-nbd` would, and starts it.
    if !matches!(cli.command, Command::Nbd(_)) {
        let serves = matches!(cli.command, Command::Mount(_) | Command::Serve(_));
        log::start(cli.verbose, serves);
    }
    limits::raise();
    match command(&cli.command) {
        Ok(code) => code,
        Err(End::Usage(error)) => usage(&error),
        Err(End::Failed(failure)) => {
            let failure = commands::lock_advice::add(&cli.command, failure);
            terminal::complain(&failure);
            if let Some(signal) = failure.signal() {
                end_by_signal(signal);
            }
            failure.code()
        }
    }
}

/// The words of the command line; those of mount(8) become ours. `None`: there is nothing to do.
///
/// Errors: an exit code; what is wrong has been said.
fn given_words(
    program: &OsStr,
    words: impl Iterator<Item = OsString>,
) -> Result<Option<Vec<OsString>>, u8> {
    if !commands::fstab::is_named_so(program) {
        return Ok(Some([program.to_owned()].into_iter().chain(words).collect()));
    }
    match commands::fstab::words(words) {
        Ok(words) => Ok(Some(words).filter(|words| !words.is_empty())),
        Err(text) => {
            let name = Path::new(program).file_name().unwrap_or(program).to_string_lossy();
            terminal::say_error(format_args!("{name}: {text}"));
            Err(Exit::General.code())
        }
    }
}

/// Does what a command says, and gives the exit code.
pub(crate) fn command(command: &Command) -> Result<u8, End> {
    match command {
        Command::Mount(args) => {
            let paths = args.paths()?;
            return if args.config.check_config {
                good(&args.config)
            } else {
                Ok(commands::mount::run(args, paths)?)
            };
        }
        Command::Serve(args) => {
            let disks = args.disks()?;
            return if args.config.check_config {
                good(&args.config)
            } else {
                Ok(commands::serve::run(args, disks)?)
            };
        }
        Command::Umount(args) => return Ok(commands::umount::run(args)?),
        Command::Ps(args) => commands::ps::run(args),
        Command::Top(args) => commands::top::run(args),
        Command::Ctl(args) => commands::ctl::run(args),
        Command::Job(args) => commands::job::run(args),
        Command::Metrics(_) => metrics::print(),
        Command::Report(args) => commands::report::run(args),
        Command::Topology(args) => commands::topology::run(args),
        Command::Create(args) => commands::create::run(args),
        Command::Info(args) => commands::info::run(args),
        Command::Map(args) => commands::map::run(args),
        Command::Check(args) => return Ok(commands::check::run(args)?),
        Command::Resize(args) => commands::resize::run(args),
        Command::Snapshot(args) => commands::snapshot::run(args),
        Command::Commit(args) => commands::commit::run(args),
        Command::Rebase(args) => commands::rebase::run(args),
        Command::Convert(args) => commands::convert::run(args),
        Command::Compare(args) => return Ok(commands::compare::run(args)?),
        Command::Measure(args) => commands::measure::run(args),
        Command::Bitmap(args) => commands::bitmap::run(args, args.works()?),
        Command::Backup(args) => commands::backup::run(args),
        Command::Restore(args) => commands::restore::run(args),
        Command::Completions(args) => commands::completions::run(args),
        Command::Man(args) => commands::man::run(args),
        Command::Nbd(args) => {
            return Ok(commands::qemu_nbd::run(commands::qemu_nbd::NAME, args.words.clone()));
        }
    }?;
    Ok(Exit::Clean.code())
}

/// The words were understood (`--check-config`).
fn good(config: &cli::ConfigArgs) -> Result<u8, End> {
    match &config.config {
        Some(file) => terminal::say(format_args!("'{}' is good.", file.display())),
        None => terminal::say("The words are good."),
    }
    Ok(Exit::Clean.code())
}

/// Prints what clap has to say: help and version (0), or what is wrong with the words (2).
fn usage(error: &clap::Error) -> u8 {
    let _ = error.print();
    match u8::try_from(error.exit_code()).unwrap_or(Exit::Usage.code()) {
        // Of `check` this code would say that the image is damaged.
        2 if is_check() => commands::check::FAILED,
        code => code,
    }
}

/// Whether the words that could not be understood began with `check`.
fn is_check() -> bool {
    std::env::args_os()
        .skip(1)
        .find(|word| !word.to_string_lossy().starts_with('-'))
        .is_some_and(|word| word == "check")
}
