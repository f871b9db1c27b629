//! `ringdisk ctl`: control of a mount, or of a disk for virtual machines, while it is served.
//!
//! Promises: asks one server and prints its answer; a server that does not answer in time ends it
//! with exit code 14. It touches neither image nor mount itself.

use std::sync::Arc;
use std::time::Duration;

use ringdisk_console::operation::Operation;
use ringdisk_console::output::{json_text, without_text};
use ringdisk_daemon::control::client::{ANSWER, Client, Timeout};
use ringdisk_daemon::control::protocol::{
    Accel, Command, Commit, CopyOnRead, Limit, NewBacking, Resize, Snapshot, Stop, Stream,
};
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::mount_lock;
use ringdisk_daemon::new_file::check_new_name;
use ringdisk_daemon::size::human_size_exact;
use ringdisk_daemon::terminal::{self, shell_word, visible, visible_lines};
use ringdisk_disk::Progress;
use ringdisk_images::inspect;
use ringdisk_observe::{job_texts, watch};
use serde_json::Value;

use crate::cli::{CtlArgs, CtlCommand, PREALLOCATION, ProgressArgs, word_of};
use crate::commands::{backup_job, checkpoint, mirror};

/// How long a server may take to end after it was told to: it flushes the image.
const STOP_WAIT: Duration = Duration::from_secs(60);
/// How long its answer to that may take at least: it looks for those who use the mount.
const STOP_ANSWER: Duration = Duration::from_secs(10);

/// Does one thing with a mount or a disk.
///
/// Errors: there is no such thing, or its server's reason.
pub(crate) fn run(args: &CtlArgs) -> Result<(), Failure> {
    let limit = args.timeout.unwrap_or(ANSWER);
    if let CtlCommand::Checkpoint(wanted) = &args.command {
        return checkpoint::run(&args.target, limit, wanted);
    }
    let mut client = Client::connect(&args.target, limit)?;
    if let CtlCommand::Mirror(wanted) = &args.command {
        return mirror::run(args, &mut client, limit, wanted);
    }
    if let CtlCommand::Backup(wanted) = &args.command {
        return backup_job::run(&mut client, limit, wanted);
    }
    match &args.command {
        CtlCommand::Events => return watch::events(&args.target, &mut client),
        CtlCommand::Stats { every: Some(every), .. } => {
            return watch::repeat(&mut client, *every, limit);
        }
        _ => {}
    }
    let command = command_of(&args.command)?;
    if let CtlCommand::Backing { file, .. } = &args.command
        && !file.as_os_str().is_empty()
    {
        inspect::note_names(file);
    }
    let progress = match &args.command {
        CtlCommand::Commit { progress, .. }
        | CtlCommand::Stream { progress, .. }
        | CtlCommand::Backing { progress, .. } => *progress,
        _ => ProgressArgs { progress: false, quiet: true },
    };
    let what = match args.command {
        CtlCommand::Backing { .. } => "compare",
        CtlCommand::Stream { .. } => "stream",
        _ => "commit",
    };
    let operation = Operation::start(what, progress)?;
    let progress = Arc::clone(operation.progress());
    let (result, left) = match &args.command {
        CtlCommand::Stop { .. } => (
            stop(&mut client, &command, args, &progress),
            "the server was asked to stop, which nobody waits for any longer",
        ),
        // These are answered at once.
        CtlCommand::Stats { .. } | CtlCommand::Limit { change: None, .. } => {
            (client.call(&command, &progress, Timeout::Answer(limit)), "nothing was changed")
        }
        CtlCommand::Snapshot(_) | CtlCommand::Accel { .. } => (
            client.call(&command, &progress, Timeout::Work(limit)),
            "the server does it all the same, unless it fails; the image is sound",
        ),
        _ => (
            client.call(&command, &progress, Timeout::Work(limit)),
            "the server was asked to give it up; the image is sound",
        ),
    };
    let changes = !matches!(
        args.command,
        CtlCommand::Stats { .. } | CtlCommand::Limit { change: None, .. } | CtlCommand::Stop { .. }
    );
    let result = result.map_err(|failure| match failure.code() == Exit::Timeout.code() {
        true if changes => failure.outcome(left),
        _ => failure,
    });
    let value = operation.end(result, left)?;
    print_result(&args.command, &client, &value);
    Ok(())
}

/// Says what was done, or what the server says.
fn print_result(command: &CtlCommand, client: &Client, value: &Value) {
    match command {
        CtlCommand::Stats { json: true, .. } => {
            terminal::say(json_text(&without_text(value.clone())));
        }
        CtlCommand::Stats { internals: false, .. } => {
            terminal::say(watch::text_of(client, value, None));
        }
        CtlCommand::Events => {}
        CtlCommand::Stats { .. } => {
            let text = value.get("text").and_then(Value::as_str).unwrap_or_default();
            terminal::say(visible_lines(text));
        }
        CtlCommand::Resize { .. } => {
            let size = value.get("size").and_then(Value::as_u64).unwrap_or(0);
            terminal::say(format_args!("The disk has {} now.", human_size_exact(size)));
        }
        CtlCommand::Snapshot(_) => {
            let text = value.get("text").and_then(Value::as_str).unwrap_or("Done.");
            terminal::say(visible_lines(text));
        }
        CtlCommand::Commit { job, progress, .. } | CtlCommand::Stream { job, progress, .. }
            if job.background =>
        {
            job_texts::begun(value, progress.quiet);
        }
        CtlCommand::Commit { progress, .. } if !progress.quiet => {
            job_texts::ended("Image committed.", value);
        }
        CtlCommand::Stream { progress, .. } if !progress.quiet => {
            job_texts::ended("Image streamed.", value);
        }
        CtlCommand::Backing { progress, .. } if !progress.quiet => {
            terminal::say("Backing file changed.");
        }
        CtlCommand::Commit { .. } | CtlCommand::Stream { .. } | CtlCommand::Backing { .. } => {}
        CtlCommand::Accel { on: true } => {
            let serves = value.get("kernel-serves").and_then(Value::as_bool);
            terminal::say(match serves {
                Some(false) => "The kernel will serve the disk as soon as a guest uses it.",
                _ => "The kernel serves the disk now.",
            });
        }
        CtlCommand::Accel { on: false } => terminal::say("The queue threads serve the disk now."),
        CtlCommand::CopyOnRead { on: true } => {
            terminal::say("What is read of backing files is kept in the image on top now.");
        }
        CtlCommand::CopyOnRead { on: false } => {
            terminal::say("What is read of backing files is kept no longer.");
        }
        CtlCommand::Limit { json: true, .. } => terminal::say(json_text(value)),
        CtlCommand::Limit { .. } => {
            let limits = value.get("limits").and_then(Value::as_str).unwrap_or_default();
            let waiting = value.get("waiting").and_then(Value::as_u64).unwrap_or(0);
            terminal::say(match waiting {
                0 => visible(limits),
                1 => format!("{} (a request waits)", visible(limits)),
                _ => format!("{} ({waiting} requests wait)", visible(limits)),
            });
        }
        CtlCommand::Stop { .. }
        | CtlCommand::Checkpoint(_)
        | CtlCommand::Mirror(_)
        | CtlCommand::Backup(_) => {}
    }
}

/// Stops, and waits for the end. Says whom the server waits for.
///
/// Errors: it is still in use, or has not ended, when the time is up; or what it said about its
/// end.
fn stop(
    client: &mut Client,
    command: &Command,
    args: &CtlArgs,
    progress: &Progress,
) -> Result<Value, Failure> {
    let shown = shell_word(&args.target.display().to_string());
    let limit = args.timeout.unwrap_or(STOP_WAIT);
    let value = client.call(command, progress, Timeout::Answer(limit.max(STOP_ANSWER)))?;
    let users = value.get("in-use").and_then(Value::as_str).map(visible);
    if let Some(users) = &users {
        terminal::note(format_args!(
            "in use by {users}: it goes on until they have closed it; `ringdisk ctl {shown} stop \
             --force` ends it now"
        ));
    }
    let forced = matches!(args.command, CtlCommand::Stop { force: true });
    match client.wait_for_end(limit, forced, progress) {
        Some(Err(failure)) => Err(failure),
        Some(_) if users.is_some() => {
            // The place may be another mount's by now, and the lock there too.
            client.wait_for_exit();
            Ok(value)
        }
        Some(_)
            if client
                .mountpoint
                .as_deref()
                .is_none_or(|path| mount_lock::wait(path, STOP_WAIT)) =>
        {
            Ok(value)
        }
        Some(_) => Err(late(limit)),
        None => Err(match users {
            Some(users) => Failure::new(
                Exit::Locked,
                format!("{shown} is in use by {users}, and goes on until they have closed it"),
            )
            .hint("close it there; or give --force, and they get errors"),
            None => late(limit),
        }),
    }
}

fn late(limit: Duration) -> Failure {
    Failure::new(Exit::Timeout, format!("the server has not ended within {limit:?}"))
        .hint("it may still be writing to the image")
}

/// What is said to the server; it does not know our directory.
fn command_of(command: &CtlCommand) -> Result<Command, Failure> {
    let absolute = |path: &Option<std::path::PathBuf>| -> Result<Option<String>, Failure> {
        let Some(path) = path else { return Ok(None) };
        let bad =
            |why: &str| Failure::new(Exit::Usage, format!("the name '{}' {why}", path.display()));
        let whole = std::path::absolute(path).map_err(|_| bad("is empty"))?;
        // Without links and `..` in the directory: the name goes into images.
        let real = whole.parent().and_then(|directory| directory.canonicalize().ok());
        let whole = match (real, whole.file_name()) {
            (Some(directory), Some(name)) => directory.join(name),
            _ => whole,
        };
        let text = whole.into_os_string().into_string();
        text.map(Some).map_err(|_| bad("is not UTF-8"))
    };
    Ok(match command {
        CtlCommand::Stats { .. } => Command::Stats,
        // These are asked for elsewhere.
        CtlCommand::Checkpoint(_) | CtlCommand::Mirror(_) | CtlCommand::Backup(_) => {
            Command::CheckpointList
        }
        CtlCommand::Limit { change, .. } => Command::Limit(Limit { change: change.clone() }),
        CtlCommand::Events => Command::Events,
        CtlCommand::Stop { force } => Command::Stop(Stop { force: *force }),
        CtlCommand::Accel { on } => Command::Accel(Accel { on: *on }),
        CtlCommand::CopyOnRead { on } => Command::CopyOnRead(CopyOnRead { on: *on }),
        CtlCommand::Resize { size, shrink, preallocation } => Command::Resize(Resize {
            size: *size,
            shrink: *shrink,
            preallocation: Some(word_of(PREALLOCATION, *preallocation).to_owned()),
        }),
        CtlCommand::Snapshot(target) => {
            target.file.as_deref().map_or(Ok(()), check_new_name)?;
            let internal = target.internal.clone();
            Command::Snapshot(Snapshot { file: absolute(&target.file)?, internal })
        }
        CtlCommand::Backing { file, format, .. } => Command::Backing(NewBacking {
            file: match file.as_os_str().is_empty() {
                true => None,
                false => absolute(&Some(file.clone()))?,
            },
            format: format.map(|format| format.name().to_owned()),
        }),
        CtlCommand::Commit { top, base, job, .. } => {
            Command::Commit(Commit { top: absolute(top)?, base: absolute(base)?, job: job.terms() })
        }
        CtlCommand::Stream { base, job, .. } => {
            Command::Stream(Stream { base: absolute(base)?, job: job.terms() })
        }
    })
}
