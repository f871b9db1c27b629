//! `ringdisk ctl`: control of a mount, or of a disk for virtual machines, while it is served.

use std::time::Duration;

use serde_json::Value;

use crate::alive;
use crate::cli::{CtlArgs, CtlCommand, ProgressArgs};
use crate::commands::output::json_text;
use crate::control::client::Client;
use crate::control::protocol::{Accel, Command, Commit, NewBacking, NewSize, Resize, Snapshot};
use crate::job::Job;
use crate::new_image::check_new_name;
use crate::report::{Exit, Failure};
use crate::size::{SizeChange, human_size_exact};
use crate::terminal;

/// How long a server may take to end after it was told to: it flushes the image.
const STOP_WAIT: Duration = Duration::from_secs(60);

/// Does one thing with a mount or a disk.
///
/// Errors: there is no such thing, or its server's reason.
pub(crate) fn run(args: &CtlArgs) -> Result<(), Failure> {
    let mut client = Client::connect(&args.target)?;
    let command = command_of(&args.command)?;
    let show = match &args.command {
        CtlCommand::Commit { show, .. } | CtlCommand::Backing { show, .. } => *show,
        _ => ProgressArgs { progress: false, quiet: true },
    };
    let what =
        if matches!(args.command, CtlCommand::Backing { .. }) { "compare" } else { "commit" };
    let job = Job::start(what, show)?;
    let result = client.call(&command, job.progress());
    let value = job.end(result, "the server was asked to give it up; the image is sound")?;
    match &args.command {
        CtlCommand::Stats { json: true } => terminal::say(json_text(&without_text(value))),
        CtlCommand::Stats { .. } => {
            terminal::say(value.get("text").and_then(Value::as_str).unwrap_or_default());
        }
        CtlCommand::Resize { .. } => {
            let size = value.get("size").and_then(Value::as_u64).unwrap_or(0);
            terminal::say(format_args!("The disk has {} now.", human_size_exact(size)));
        }
        CtlCommand::Snapshot(_) => {
            let text = value.get("text").and_then(Value::as_str).unwrap_or("Done.");
            terminal::say(text);
        }
        CtlCommand::Commit { show, .. } if !show.quiet => terminal::say("Image committed."),
        CtlCommand::Backing { show, .. } if !show.quiet => terminal::say("Backing file changed."),
        CtlCommand::Commit { .. } | CtlCommand::Backing { .. } => {}
        CtlCommand::Accel { on: true } => {
            let serves = value.get("kernel-serves").and_then(Value::as_bool);
            terminal::say(match serves {
                Some(false) => "The kernel will serve the disk as soon as a guest uses it.",
                _ => "The kernel serves the disk now.",
            });
        }
        CtlCommand::Accel { on: false } => terminal::say("The queue threads serve the disk now."),
        CtlCommand::Stop => {
            let has_ended = client.wait_for_end(STOP_WAIT);
            if !(has_ended && client.mountpoint.as_deref().is_none_or(alive::wait)) {
                terminal::note("the server has not ended yet");
            }
        }
    }
    Ok(())
}

/// The text is for people only.
pub(crate) fn without_text(mut value: Value) -> Value {
    if let Value::Object(object) = &mut value {
        object.remove("text");
    }
    value
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
        CtlCommand::Stop => Command::Stop,
        CtlCommand::Accel { on } => Command::Accel(Accel { on: *on }),
        CtlCommand::Resize { size, shrink, preallocation } => Command::Resize(Resize {
            size: match *size {
                SizeChange::To(size) => NewSize::To(size),
                SizeChange::Grow(by) => NewSize::Grow(by),
                SizeChange::Shrink(by) => NewSize::Shrink(by),
            },
            shrink: *shrink,
            preallocation: Some(preallocation.name().to_owned()),
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
        CtlCommand::Commit { top, base, .. } => {
            Command::Commit(Commit { top: absolute(top)?, base: absolute(base)? })
        }
    })
}
