//! `ringdisk man`: man pages from the definition of the command line.
//!
//! Promises: made from the definition of the command line, so no option is missing. Writes only
//! below the directory that is given.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use ringdisk_daemon::failure::{Exit, Failure, MEANINGS};
use ringdisk_daemon::terminal::{self, Results};

use crate::cli::{Cli, ManArgs};

/// Prints `ringdisk.1`, or writes all pages into a directory, which is made when it is not there.
///
/// Errors: a page cannot be written.
pub(crate) fn run(args: &ManArgs) -> Result<(), Failure> {
    let mut root = Cli::command().disable_help_subcommand(true);
    root.build();
    let Some(directory) = &args.directory else {
        let mut out = Results::lock();
        let text = page(&root).map_err(|error| unwritable("the man page", &error))?;
        terminal::ended(out.write_all(&text))?;
        return out.finish();
    };
    fs::create_dir_all(directory)
        .map_err(|error| unwritable(&directory.display().to_string(), &error))?;
    write_page(directory, &root)?;
    for command in root.get_subcommands() {
        write_page(directory, command)?;
    }
    Ok(())
}

fn write_page(directory: &Path, command: &Command) -> Result<(), Failure> {
    // "ringdisk-mount" for the command "ringdisk mount".
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let path = directory.join(format!("{name}.1"));
    page(command)
        .and_then(|text| fs::write(&path, text))
        .map_err(|error| unwritable(&path.display().to_string(), &error))
}

fn unwritable(what: &str, error: &io::Error) -> Failure {
    Failure::system(format!("cannot write '{what}'"), error, Exit::General)
}

/// One page.
fn page(command: &Command) -> io::Result<Vec<u8>> {
    // Examples are shown as they are below, not run together like clap's text for the terminal.
    let examples = command.get_after_help().map(ToString::to_string);
    let man = Man::new(command.clone().after_help("").after_long_help(""))
        .section("1")
        .manual("User Commands")
        .source(format!("{} {}", terminal::NAME, env!("CARGO_PKG_VERSION")));
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    if command.get_opts().next().is_some() || command.get_positionals().next().is_some() {
        man.render_options_section(&mut text)?;
    }
    if command.has_subcommands() {
        man.render_subcommands_section(&mut text)?;
    }
    if let Some(examples) = examples {
        render_examples(&examples, &mut text)?;
    }
    if ["mount", "umount", "serve"].contains(&command.get_name()) || command.has_subcommands() {
        render_files(&mut text)?;
    }
    match command.get_name() {
        "check" => render_statuses(&CHECK_STATUS, &mut text)?,
        "compare" => render_statuses(&COMPARE_STATUS, &mut text)?,
        _ => render_exit_status(&mut text)?,
    }
    Ok(text)
}

/// The examples, line by line.
fn render_examples(examples: &str, out: &mut dyn Write) -> io::Result<()> {
    let mut roff = Roff::default();
    roff.control("SH", ["EXAMPLES"]);
    roff.control("nf", []);
    for line in examples.lines().skip(1) {
        roff.text([roman(line)]);
    }
    roff.control("fi", []);
    roff.to_writer(out)
}

/// What is read and written besides the image.
fn render_files(out: &mut dyn Write) -> io::Result<()> {
    let mut roff = Roff::default();
    roff.control("SH", ["ENVIRONMENT AND FILES"]);
    for (name, text) in [
        ("NOTIFY_SOCKET", "The socket of a service manager, as sd_notify(3) describes it."),
        (
            "LISTEN_FDS, LISTEN_PID, LISTEN_FDNAMES",
            "Listening sockets for serve from a service manager, as sd_listen_fds(3) describes \
             them.",
        ),
        ("NO_COLOR", "No colours on a terminal."),
        ("/etc/fuse.conf", "user_allow_other in it lets users other than root give --allow-other."),
        (
            "/proc/sys/kernel/io_uring_disabled",
            "Must be 0 (or 1 for members of kernel.io_uring_group and root).",
        ),
    ] {
        roff.control("TP", []);
        roff.text([bold(name)]);
        roff.text([roman(text)]);
    }
    roff.to_writer(out)
}

/// Codes of the commands that have those of qemu-img.
const CHECK_STATUS: [(&str, &str); 5] = [
    ("0", "Nothing is wrong (any more, after a repair)."),
    ("1", "The check did not end: the image cannot be opened or read, the command line is wrong."),
    ("2", "The image is damaged."),
    ("3", "Space is leaked, nothing else is wrong."),
    ("63", "The format has nothing to check (raw)."),
];
const COMPARE_STATUS: [(&str, &str); 5] = [
    ("0", "The disks hold the same."),
    ("1", "They differ."),
    ("2", "An image cannot be opened, or the command line is wrong."),
    ("3", "What is known about a range cannot be looked up."),
    ("4", "A range cannot be read."),
];

fn render_statuses(statuses: &[(&str, &str)], out: &mut dyn Write) -> io::Result<()> {
    let mut roff = Roff::default();
    roff.control("SH", ["EXIT STATUS"]);
    for (code, meaning) in statuses {
        roff.control("TP", []);
        roff.text([bold(*code)]);
        roff.text([roman(*meaning)]);
    }
    roff.to_writer(out)
}

/// The stable exit codes.
fn render_exit_status(out: &mut dyn Write) -> io::Result<()> {
    let mut roff = Roff::default();
    roff.control("SH", ["EXIT STATUS"]);
    for (exit, name, meaning) in MEANINGS {
        roff.control("TP", []);
        roff.text([bold(exit.code().to_string()), roman(format!(" ({name})"))]);
        roff.text([roman(meaning)]);
    }
    roff.to_writer(out)
}
