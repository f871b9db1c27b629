//! The words of `ringdisk job`, and of commands that begin a job.
//!
//! Promises: parses only; no server is asked.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use ringdisk_daemon::control::protocol::jobs::{Terms, check_name};
use ringdisk_daemon::size::parse_size;

const JOB_EXAMPLES: &str = "\
Examples:
  ringdisk ctl /srv/disk commit --background --name nightly
  ringdisk job list                                what runs, of all disks of this user
  ringdisk job limit nightly 50M                   50 MiB in a second at most
  ringdisk job pause /srv/disk nightly             of this disk, where several have one of that name
  ringdisk job resume nightly
  ringdisk job wait nightly                        until it has ended; its exit code
  ringdisk job complete mirror-1                   the disk switches over to the copy
  ringdisk job cancel nightly                      the disk is as it was before";

/// Show and control what disks copy while they are in use (`ringdisk ctl TARGET commit`, `stream`,
/// `mirror`)
///
/// TARGET is a file that an image is served as, or a socket, as for `ringdisk ctl`; without it the
/// disks of all serving processes of this user are meant, as root of all users. Jobs that have
/// ended stay in the list until the disk is served no longer, the last 16 of each disk. States:
/// created, running, paused (by `job pause`, or since the image that is written is full), ready (a
/// mirror that is in step), aborting (it was cancelled), concluded (it has ended).
#[derive(Args, Debug)]
#[command(after_help = JOB_EXAMPLES)]
pub(crate) struct JobArgs {
    #[command(subcommand)]
    pub(crate) work: JobWork,
}

/// What is done with jobs.
#[derive(Debug, Subcommand)]
pub(crate) enum JobWork {
    /// List them: how each is, how far, how fast, and how long it will take
    List {
        /// Of this disk only
        #[arg(value_name = "TARGET")]
        target: Option<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Let a job rest: it copies nothing until it is resumed
    Pause(JobName),
    /// Let a paused job go on; what failed is tried again
    Resume(JobName),
    /// Change the speed limit of a job
    Limit {
        #[command(flatten)]
        job: JobName,
        /// Bytes in a second, such as 50M; 0: no limit
        #[arg(value_name = "RATE", value_parser = parse_size)]
        speed: u64,
    },
    /// Give a job up: the disk is as it was before the job
    ///
    /// A mirror that is ready leaves its target as a copy of the disk of this moment; given a
    /// second time, the command gives such a job up at once, and the copy may not be whole.
    Cancel(JobName),
    /// Have the disk of a mirror switch over to the target as soon as that is in step
    Complete(JobName),
    /// Wait until a job has ended; the exit code is that of the job
    ///
    /// The wait for a mirror ends when it is ready, unless it was told to complete, or to end.
    /// Ctrl-C ends the waiting, not the job.
    Wait(JobName),
}

/// Names a job.
#[derive(Args, Debug)]
pub(crate) struct JobName {
    /// The job, as `job list` names it; before it, the disk
    #[arg(value_name = "[TARGET] ID", required = true, num_args = 1..=2)]
    names: Vec<String>,
}

impl JobName {
    /// The disk, if one is named.
    pub(crate) fn target(&self) -> Option<&str> {
        self.names.first().filter(|_| self.names.len() > 1).map(String::as_str)
    }

    /// The job.
    pub(crate) fn id(&self) -> &str {
        self.names.last().map(String::as_str).unwrap_or_default()
    }
}

/// How a job is run.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct JobRunArgs {
    /// Do not wait for the end: print the name of the job, which goes on in the serving process
    #[arg(long)]
    pub(crate) background: bool,

    /// Name of the job [default: what it does, and a number: commit-1]
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    name: Option<String>,

    /// Copy at most so many bytes in a second, such as 50M [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = parse_size)]
    speed: Option<u64>,

    /// What an error of the image that is written does: report (it ends the job), stop (the job
    /// rests until `ringdisk job resume`), enospc (where the image is full, the job waits for
    /// space), ignore (a mirror or backup tries again and again) [default: enospc in the
    /// background, else report]
    #[arg(long, value_name = "WHAT", value_parser = on_error_parser())]
    on_error: Option<String>,
}

impl JobRunArgs {
    /// As the server reads it; `None`: nothing is said, as older servers understand.
    pub(crate) fn terms(&self) -> Option<Terms> {
        let terms = Terms {
            name: self.name.clone(),
            background: self.background,
            speed: self.speed.unwrap_or(0),
            on_error: self.on_error.clone(),
        };
        Some(terms).filter(|terms| *terms != Terms::default())
    }
}

fn parse_name(text: &str) -> Result<String, String> {
    check_name(text).map(|()| text.to_owned())
}

fn on_error_parser() -> impl TypedValueParser<Value = String> {
    PossibleValuesParser::new(["report", "stop", "enospc", "ignore"])
}
