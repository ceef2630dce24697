/* What each level calls of levels.c. */
#ifndef PS_LEVELS_H
#define PS_LEVELS_H

void ps_enter(void); /* a thread begins its part of a call */
void ps_leave(void); /* and ends it */

#endif
