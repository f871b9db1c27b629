//! Which user a process serves as (`--user`).
//!
//! Promises: root's powers end when the process enters its sandbox, in the same moment: all that
//! takes root has been done by then, and what takes root later the helper process does. `auto`
//! changes nothing that a command could do before, but what the owner of an image may not do with
//! it; where that is not so, the process stays root, and says why.
//!
//! [`Wanted::of`] when the words are read, [`Wanted::decide`] when the images are open,
//! [`Decision::enter`] at the end.

mod image_access;
mod names;
mod option;

use names::Identity;
pub use names::{members_of, number_of, user_name};
pub use option::RequestedUser;
use ringdisk_disk::Disk;
use ringdisk_sandbox::{Plan, User, become_user};

use crate::confine::{self, Confinement};
use crate::failure::{Exit, Failure};
use crate::limits;
use crate::terminal;

/// What the command line asks for, as far as this process can.
#[derive(Debug)]
pub enum Wanted {
    /// No other user than the present one, who is not root.
    AsIs,
    /// The owner of the images, where that does.
    Auto,
    /// Root.
    Root,
    /// This one.
    Is(Identity),
}

/// Which user it will be.
#[derive(Debug, Default)]
pub struct Decision {
    becomes: Option<Identity>,
    /// Why it stays root, for people.
    stays: Option<String>,
    /// The user was named, so nothing else will do.
    is_insisted_on: bool,
}

impl Wanted {
    /// Errors: a user that is not known; another user, and this process is not root's.
    pub fn of(word: &RequestedUser) -> Result<Wanted, Failure> {
        let own = rustix::process::geteuid();
        let refuse = || {
            let text = format!("--user: only root can serve as another user, and this is {own}");
            Err(Failure::new(Exit::Usage, text).hint("leave it out, or start as root"))
        };
        match word {
            RequestedUser::Auto if own.is_root() => Ok(Wanted::Auto),
            RequestedUser::Root if own.is_root() => Ok(Wanted::Root),
            RequestedUser::Auto => Ok(Wanted::AsIs),
            RequestedUser::Root => refuse(),
            RequestedUser::Is { user, group } => match names::find(user, group.as_deref())? {
                found if own.is_root() => Ok(found.map_or(Wanted::Root, Wanted::Is)),
                Some(found) if found.is(own.as_raw(), rustix::process::getegid().as_raw()) => {
                    Ok(Wanted::AsIs)
                }
                _ => refuse(),
            },
        }
    }

    /// Decides, and changes nothing.
    ///
    /// * `disks`: with all their images open.
    ///
    /// Errors: the user that was named is one that this process cannot become.
    pub fn decide(self, word: Confinement, disks: &[&Disk]) -> Result<Decision, Failure> {
        match self {
            Wanted::AsIs => Ok(Decision::default()),
            Wanted::Root => Ok(Decision::stays("--user root")),
            Wanted::Auto if word == Confinement::Off => Ok(Decision::stays("--sandbox off")),
            Wanted::Auto => Ok(match image_access::owner(disks) {
                Ok(owner) => Decision { becomes: Some(owner), ..Decision::default() },
                Err(why) => Decision::stays(why),
            }),
            Wanted::Is(user) => {
                match image_access::may_open(&user, disks) {
                    Ok(Ok(())) => {}
                    Ok(Err(why)) => terminal::warn(format_args!(
                        "{why}: it is open now, and commands that open it again (ctl commit and \
                         backing, the end of a migration) will fail"
                    )),
                    Err(why) => {
                        let hint = "--user root serves as root; a container needs CAP_SETUID and \
                            CAP_SETGID";
                        return Err(Failure::new(Exit::Permission, why).hint(hint));
                    }
                }
                Ok(Decision { becomes: Some(user), stays: None, is_insisted_on: true })
            }
        }
    }
}

impl Decision {
    fn stays(why: impl Into<String>) -> Decision {
        let why = why.into();
        tracing::info!("stays root: {why}");
        Decision { stays: Some(why), ..Decision::default() }
    }

    /// Whether something changes: the process will not be able to remove what it made, and perhaps
    /// not in a sandbox.
    pub fn is_change(&self) -> bool {
        self.becomes.is_some()
    }

    /// Who it will be. `None`: no other than now.
    pub fn user(&self) -> Option<User> {
        self.becomes.as_ref().map(|identity| identity.user)
    }

    /// Who it will be, in words.
    pub fn name(&self) -> Option<String> {
        self.becomes.as_ref().map(Identity::to_string)
    }

    /// Something is missing without which only root can serve.
    ///
    /// Errors: the user was named.
    pub fn stay(&mut self, why: &str) -> Result<(), Failure> {
        match self.becomes.take() {
            Some(user) if self.is_insisted_on => {
                let text = format!("the process cannot become user {user}: {why}");
                Err(Failure::new(Exit::Unsupported, text).hint("--user root serves as root"))
            }
            Some(_) => {
                *self = Decision::stays(why);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Enters the sandbox, if one is wanted, as that user. Gives what is in force, in words;
    /// `None`: nothing is.
    ///
    /// * `word`: whether a sandbox is wanted.
    /// * `goes_on`: a guest depends on this process, so what fails is complained of and nothing
    ///   more.
    ///
    /// Errors: those of [`confine::enter`]; a thread could not become that user. None if `goes_on`.
    pub fn enter(
        &self,
        word: Confinement,
        plan: Plan,
        goes_on: bool,
    ) -> Result<Option<String>, Failure> {
        if let Some(user) = &self.becomes {
            tracing::info!("serves as user {user}");
            limits::raise_for_another_user();
        }
        if !confine::is_wanted(word) {
            let Some(user) = &self.becomes else { return Ok(None) };
            let result = become_user(user.user);
            let result = result.map_err(|error| Failure::new(Exit::Permission, error.to_string()));
            return match result {
                Err(failure) if goes_on => {
                    let text = format!("off, not complete: {}", failure.message());
                    terminal::complain(&failure);
                    Ok(Some(text))
                }
                result => result.map(|()| Some(format!("off, user {user}"))),
            };
        }
        let plan = match &self.becomes {
            Some(user) => plan.user(user.user),
            None => plan,
        };
        let in_force = match goes_on {
            true => confine::enter_as_far_as_possible(plan, word),
            false => confine::enter(plan)?,
        };
        Ok(Some(match (&self.becomes, &self.stays) {
            (Some(user), _) => format!("{in_force}, user {user}"),
            (None, Some(why)) => format!("{in_force}, stays root: {why}"),
            (None, None) => in_force,
        }))
    }
}
