//! The sandbox of a process that serves disks for virtual machines.
//!
//! Promises: what is named here is all that serving takes after the start: images of every disk, names that go at the end, front ends that
//! are connected to again. Main thread, once, when everything has been made and before a front end is listened to; guests of disks that were
//! taken over (`--upgrade`) are served already, and then nothing that happens here ends the process.

use std::collections::BTreeSet;
use std::path::Path;

use ringdisk_sandbox::{Calls, Plan};

use super::Running;
use crate::cli::SandboxWord;
use crate::notify::Notify;
use crate::pidfile::Pidfile;
use crate::report::Failure;
use crate::sandbox::{self, Duties, Named};
use crate::sockets::MadeSocket;
use crate::upgrade::Giver;

/// Takes everything away that serving does not need, and lets `ringdisk ctl` tell.
///
/// * `notify`: the warden speaks to the service manager from then on.
/// * `taken`: these disks were another process's, which has nothing of them any more. What is missing then is complained of, however much
///   it was insisted on: a guest without its disk is worse.
///
/// Errors: those of [`sandbox::enter`]; none if `taken`.
pub(super) fn enter(
    word: SandboxWord,
    disks: &[Running],
    pidfile: Option<&Pidfile>,
    notify: &Notify,
    taken: bool,
) -> Result<(), Failure> {
    let mut files: Vec<Named> = disks.iter().flat_map(Running::names).collect();
    let mut plan = sandbox::plan(word);
    let directories: BTreeSet<&Path> = files.iter().filter_map(|(name, _)| name.parent()).collect();
    for directory in directories {
        // Locked while a socket goes.
        plan = plan.list(directory);
    }
    for disk in disks {
        let told_within = taken.then_some(&disk.reach);
        plan = sandbox::images(plan, word, &disk.disk, &disk.allowed, told_within);
    }
    files.extend(pidfile.and_then(Pidfile::identity));
    let fronts = disks.iter().filter_map(|disk| disk.front.clone()).collect();
    let vhost = disks.iter().any(|disk| disk.served.has_kernel());
    let (plan, has_warden) = through_warden(plan, &Duties { mount: None, files, fronts }, vhost);
    if has_warden {
        notify.leave_to_warden();
    }
    let in_force = match taken {
        true => sandbox::enter_as_far_as_possible(plan, word),
        false => sandbox::enter(plan)?,
    };
    disks.iter().for_each(|disk| disk.commands.confined(in_force.clone()));
    Ok(())
}

/// Sets a process to do what this one will not be able to; what it cannot do stays possible here. Says whether there is one.
///
/// * `vhost`: rings may be handed to the host kernel.
fn through_warden(plan: Plan, duties: &Duties, vhost: bool) -> (Plan, bool) {
    let warden = sandbox::set_warden(duties);
    let is_ours = |front: &Path| warden.is_err() || !sandbox::is_for_warden(front);
    let sockets = duties.fronts.iter().any(|front| is_ours(front));
    let plan = plan.calls(Calls { sockets, vhost, ..Calls::default() });
    match warden {
        Ok(_) => (plan, true),
        Err(error) => {
            let why = format!("no landlock, since nobody outside could remove sockets: {error}");
            (plan.without_files(why), false)
        }
    }
}

impl Running {
    /// What goes at the end, if it is still there.
    fn names(&self) -> Vec<Named> {
        let made = self.made.as_ref().map(MadeSocket::named);
        let control = self.control.as_ref().map(|(_, named)| named.clone());
        let successor = self.giver.as_ref().map(Giver::named);
        [made, control, successor].into_iter().flatten().collect()
    }
}
